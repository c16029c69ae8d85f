"""Decoding from a cache that keeps states: what transformers' generation would do to it and cannot."""

from transformers.generation import GenerationMixin


class StatefulGenerationMixin(GenerationMixin):
    """transformers' decoding, except what would need a state to be rolled back; before `PreTrainedModel`."""

    @property
    def _is_stateful(self) -> bool:
        """Whether the cache keeps a state; by this transformers refuses assisted decoding of the model."""
        return True

    def generate(self, *args, **kwargs):
        """As everywhere in transformers, but refused where the model is the assistant."""
        if self._is_stateful and getattr(kwargs.get("generation_config"), "is_assistant", False):
            raise ValueError(
                f"assistant_model must not be stateful, since its rejected tokens are taken back; got a "
                f"{type(self).__name__}, which keeps a state"
            )
        return super().generate(*args, **kwargs)
