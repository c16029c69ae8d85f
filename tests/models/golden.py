"""Records of what is public about every model type: config fields with defaults, state-dict names with shapes.

`python -m tests.models.golden` writes them anew after a deliberate change; the difference belongs in the changelog.
"""

import json
from pathlib import Path

from hf_hybrid.models.auto import ARCHITECTURES

from .tiny import tiny_model

GOLDEN_FOLDER = Path(__file__).parent / "golden"


def golden_record(model_type: str) -> dict:
    """What the golden file of a model type must say."""
    config_class, models = ARCHITECTURES[model_type]
    inherited = set(config_class.__mro__[1]().to_dict())
    fields = {key: value for key, value in config_class().to_dict().items() if key not in inherited}
    return {
        "config": dict(sorted(fields.items())),
        "state_dict": {
            auto_class: {
                name: list(tensor.shape)
                for name, tensor in sorted(tiny_model(model_type, auto_class).state_dict().items())
            }
            for auto_class in sorted(models)
        },
    }


if __name__ == "__main__":
    GOLDEN_FOLDER.mkdir(exist_ok=True)
    for name in ARCHITECTURES:
        (GOLDEN_FOLDER / f"{name}.json").write_text(json.dumps(golden_record(name), indent=1) + "\n")
