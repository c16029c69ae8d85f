"""The Long Range Arena: expressions, images that are what they are said to be, official files, and broken ones."""

import collections
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from transformers import ByT5Tokenizer

from hf_hybrid.data.drawing import SPLITS, split_generator
from hf_hybrid.data.lra import (
    LISTOPS_TOKENS,
    LRA,
    PATHFINDER,
    DrawingStopped,
    Pathfinder,
    check_tokenizer,
    draw_listops,
    draw_pathfinder,
    evaluate_listops,
    kept,
    load_lra,
    load_lra_once,
    lra_tokenizer,
    parse_listops,
    pathfinder,
    tasks,
)
from hf_hybrid.data.lra.readers import (
    byte_ids,
    read_arrays,
    read_cifar10,
    read_listops,
    read_pairs,
    read_pathfinder,
    read_reviews,
)
from hf_hybrid.data.tokenizer import byte_tokenizer
from tests.matrix import some


def taken(count, split="train", seed=0, **sizes):
    drawn = draw_listops(split_generator(seed, split), **sizes)
    return [next(drawn) for _ in range(count)]


# ---- ListOps ----

NAMES = {"[MIN": min, "[MAX": max, "[SM": lambda *x: sum(x) % 10, "[MED": lambda *x: math.floor(np.median(x))}


def by_python(tokens):
    """The value, by Python's own parser."""
    words = {name: f"f{number}(" for number, name in enumerate(NAMES)} | {"]": "),"}
    text = "".join(words.get(token, f"{token},") for token in tokens)
    functions = {f"f{number}": function for number, function in enumerate(NAMES.values())}
    (value,) = eval(f"({text})", functions)
    return int(value)


def tree(tokens):
    """The expression as nested lists."""
    stack = [[]]
    for token in tokens:
        if token == "]":
            closed = stack.pop()
            stack[-1].append(closed)
        elif token.startswith("["):
            stack.append([token])
        else:
            stack[-1].append(token)
    (whole,) = stack[0]
    return whole


def depth(node):
    return 1 + max(map(depth, node[1:])) if isinstance(node, list) else 1


def arguments(node):
    if isinstance(node, list):
        yield node
        for part in node[1:]:
            yield from arguments(part)


def test_values_are_those_of_pythons_own_parser():
    for tokens, value in taken(60) + taken(60, shortest=4, longest=40):
        assert value == by_python(tokens)


def test_expressions_keep_to_the_published_bounds():
    found = taken(60)
    assert len({tuple(tokens) for tokens, _ in found}) == 60
    for tokens, _ in found:
        assert 500 < len(tokens) < 2000
        whole = tree(tokens)
        assert depth(whole) <= 10
        assert all(2 <= len(node) - 1 <= 10 for node in arguments(whole))


def test_the_grammar_has_the_published_probabilities():
    """A quarter of a root's arguments are operations, of equally likely kinds and sizes."""
    trees = [tree(tokens) for tokens, _ in taken(3000, shortest=1, longest=10**6, max_depth=3)]
    assert {depth(whole) for whole in trees} == {2, 3}
    parts = [part for whole in trees for part in whole[1:]]
    inner = [part for part in parts if isinstance(part, list)]
    assert abs(len(inner) / len(parts) - 0.25) < 0.02
    sizes = collections.Counter(len(part) - 1 for part in inner)
    kinds = collections.Counter(part[0] for part in inner)
    assert sizes.keys() == set(range(2, 11))
    for counts in (sizes, kinds):
        assert max(counts.values()) < 1.3 * min(counts.values())


def test_splits_and_seeds_differ():
    texts = [" ".join(tokens) for split in SPLITS for seed in (0, 1) for tokens, _ in taken(20, split, seed)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MED 1 2 3 4 ]", 2),
        ("[MED 9 1 5 ]", 5),
        ("[SM 9 9 [MIN 4 3 ] ]", 1),
        ("( ( ( [MAX 2 ) ( ( ( [SM 5 ) 6 ) ] ) ) ] )", 2),
    ],
)
def test_expressions_by_hand(text, value):
    assert evaluate_listops(parse_listops(text)) == value


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["[MAX", "1"], "tokens must be a whole expression; 1 operations are still open"),
        (["[MAX", "]"], "tokens must close an operation with arguments at token 1; got ']'"),
        (["]"], "tokens must close an operation with arguments at token 0; got ']'"),
        (["1", "2"], "tokens must be one expression; it ends before token 1, '2'"),
        (["[SUM", "2", "]"], "tokens must be of 0 1 2 3 4 5 6 7 8 9 [MIN [MAX [MED [SM ]; got '[SUM' at token 0"),
        ([], "tokens must be a whole expression; 0 operations"),
    ],
)
def test_what_is_no_expression_is_refused(tokens, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluate_listops(tokens)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_args": 1}, "max_args must be an integer of at least 2; got 1"),
        ({"longest": 500}, "longest must be more than shortest 500 + 1; got 500"),
        ({"max_depth": 3}, "shortest must be below 122, the longest expression of 3 levels; got 500"),
    ],
)
def test_sizes_that_no_expression_has_are_refused(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        next(draw_listops(split_generator(0, "train"), **sizes))


# ---- Pathfinder ----


def ends_of(image):
    """The path of each disc: what hangs together once small gaps are closed."""
    paths, _ = ndimage.label(ndimage.binary_dilation(image > 40), np.ones((3, 3)))
    discs, count = ndimage.label(ndimage.binary_opening(image > 200, np.ones((4, 4))))
    return [paths[tuple(np.argwhere(discs == number)[0])] for number in range(1, count + 1)]


def test_one_path_joins_the_discs_of_a_positive_image_and_none_those_of_a_negative_one():
    """Drawn large and without other paths, so that the paths can be followed by closing their gaps."""
    settings = Pathfinder(
        size=96, dashes=6, dash_length=8.0, thickness=1.5, margin=1.0, seed_distance=24.0, radius=3.0, distractors=0
    )
    images, labels = draw_pathfinder(40, split_generator(0, "train"), settings)
    assert 8 < labels.sum() < 32
    joined = {0: [], 1: []}
    for image, label in zip(images, labels, strict=True):
        first, last = ends_of(image)
        joined[label].append(first == last)
    assert all(joined[1])
    assert sum(joined[0]) < 0.5 * len(joined[0])  # those in which the two paths come close enough to look like one


@pytest.mark.parametrize("name", PATHFINDER)
def test_images_are_as_described(name):
    settings = PATHFINDER[name]
    images, labels = draw_pathfinder(24, split_generator(1, "train"), settings)
    assert images.shape == (24, settings.size, settings.size)
    assert images.dtype == np.uint8
    assert set(labels) == {0, 1}
    white = (images > 230).sum(axis=(1, 2))
    assert white.min() >= 1  # discs are brighter than thin dashes
    ink = images.mean(axis=(1, 2)) / 255
    dash = settings.dash_length * settings.thickness
    most = 2 * settings.dashes + settings.distractors * settings.distractor_dashes
    discs = 2 * math.pi * settings.radius**2
    area = settings.size**2
    assert (ink * area > 0.7 * (2 * settings.dashes * dash)).all()
    assert (ink * area < 1.4 * (most * dash + discs) + 8).all()


@pytest.mark.parametrize(("name", "low", "high"), [("lra", 14, 17), ("small", 6, 9)])
def test_one_path_begins_in_the_middle_and_the_other_at_its_distance(name, low, high):
    """The published program keeps the first beginning twice the seed distance from the border: 14 to 17 of 32."""
    settings, generator = PATHFINDER[name], split_generator(0, "train")
    starts = [[path[0][0] for path in pathfinder._two_paths(generator, settings)[0]] for _ in range(30)]
    first, second = np.swapaxes(starts, 0, 1)
    assert low <= first.min() <= first.max() <= high
    assert np.ptp(first, axis=0).min() > 2
    np.testing.assert_allclose(np.linalg.norm(first - second, axis=1), settings.seed_distance)


def test_more_distractors_are_more_ink():
    less, more = (
        draw_pathfinder(12, split_generator(0, "test"), replace(PATHFINDER["lra"], distractors=count))[0].mean()
        for count in (0, 5)
    )
    assert more > 1.1 * less


@pytest.mark.parametrize(("name", "least"), [("lra", 4), ("small", 1.6)])
def test_most_distractors_find_room(name, least, monkeypatch):
    found, draw = [], pathfinder._short_path
    monkeypatch.setattr(pathfinder, "_short_path", lambda *args: found.append(draw(*args)) or found[-1])
    draw_pathfinder(24, split_generator(0, "train"), PATHFINDER[name])
    assert {len(path) for path in found} == {0, PATHFINDER[name].distractor_dashes}
    assert sum(map(bool, found)) / 24 > least


@pytest.mark.full
def test_the_places_of_the_discs_do_not_tell_the_label(monkeypatch):
    """Unless images are drawn one by one: more than three of four with near discs are negative then."""
    discs = []
    monkeypatch.setattr(pathfinder, "_painted", lambda settings, dashes, places: discs.append(places) or 0)
    for candidates in (1, 3):
        settings, labels = replace(PATHFINDER["small"], candidates=candidates), []
        for _ in range(4):
            labels.append(draw_pathfinder(100, split_generator(len(labels), "train"), settings)[1])
        one, two = np.moveaxis(np.array(discs) - 7.5, 1, 0)
        measures = [np.hypot(*(one - two).T), *np.sort([np.hypot(*one.T), np.hypot(*two.T)], axis=0)]
        label = np.concatenate(labels)
        shares = [[part.mean() for part in np.array_split(label[np.argsort(x)], 4)] for x in measures]
        if candidates == 1:
            assert shares[0][0] < 0.3
        else:
            assert label.mean() == 0.5
            # two standard errors, were they drawn freely
            assert 0.4 < min(map(min, shares)) < max(map(max, shares)) < 0.6
        discs.clear()


def test_scenes_are_chosen_once_and_alike():
    places = np.random.default_rng(0).uniform(-7, 7, size=(2, 31, 2, 2))
    chosen = pathfinder._alike(*places, 11)
    assert [first == last for _, first, last in chosen] == [True, False] * 6
    assert len({scene for scene, _, _ in chosen}) == 12
    placed = pathfinder._placed(*(places[at, [c[0] for c in chosen], [c[1 + at] for c in chosen]] for at in (0, 1)))
    apart = np.linalg.norm(placed[::2] - placed[1::2], axis=1)
    assert (np.diff(apart) >= 0).all()
    turned = [places[..., ::-1] * [1, -1], places * [-1, 1]]
    for turn in turned:
        assert np.allclose(pathfinder._placed(turn[0, :, 0], turn[1, :, 0]), pathfinder._placed(*places[:, :, 0]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"candidates": 0}, "candidates must be an integer of at least 1; got 0"),
        ({"size": 4}, "size must be an integer of at least 8; got 4"),
        ({"thickness": 0}, "thickness must be positive; got 0"),
        ({"seed_distance": 15.0}, "seed_distance must be below half of the 30 pixels; got 15.0"),
        ({"dashes": 60}, "dashes must be few enough for 32 x 32 pixels; got 60"),
        ({"distractors": -1}, "distractors must be an integer of at least 0; got -1"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Pathfinder(**fields)


def test_images_of_splits_differ_and_repeat_for_a_seed():
    first, again, other = (draw_pathfinder(4, split_generator(0, split)) for split in ("train", "train", "test"))
    assert (first[0] == again[0]).all()
    assert not any((one == two).all() for one in first[0] for two in other[0])


# ---- files ----


def test_official_listops(tmp_path):
    folder = tmp_path / "lra_release" / "lra_release" / "listops-1000"
    folder.mkdir(parents=True)
    (folder / "basic_train.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n4\t4\n")
    rows = load_lra("lra_listops", "train", data_dir=tmp_path)
    assert [[LISTOPS_TOKENS[place] for place in row] for row in rows.inputs] == [["[MAX", "2", "9", "]"], ["4"]]
    assert rows.labels.tolist() == [9, 4]
    missing = (
        "basic_val.tsv (official, from https://storage.googleapis.com/long-range-arena/lra_release.gz) or validation"
    )
    with pytest.raises(ValueError, match=re.escape(missing)):
        load_lra("lra_listops", "validation", data_dir=tmp_path)
    (folder / "basic_val.tsv").write_text("Source\tTarget\n[MAX 2 9 ]\t8\n")
    with pytest.raises(ValueError, match=r"row 1 \(the first row is 1\): Target must be 9, the value"):
        load_lra("lra_listops", "validation", data_dir=tmp_path)
    (folder / "basic_val.tsv").write_text("Source\tTarget\n[MAX 2 x ]\t8\n")
    with pytest.raises(ValueError, match=r"an expression must have the words 0 1 2 .* got 'x'"):
        list(read_listops(folder / "basic_val.tsv"))


def test_own_files_are_called_like_the_splits(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"source": "[MIN 2 9 ]", "target": 2}\n{"source": "3", "target": 3}\n')
    assert load_lra("lra_listops", "train", data_dir=tmp_path).labels.tolist() == [2, 3]
    assert load_lra("lra_listops", "train", data_dir=tmp_path, count=1).labels.tolist() == [2]
    (tmp_path / "test.jsonl").write_text('{"text": "schön", "label": 1}\n{"text": "no", "label": "neg"}\n')
    rows = load_lra("lra_text", "test", data_dir=tmp_path)
    assert bytes(value - 3 for value in rows.inputs[0]).decode() == "schön"
    assert rows.labels.tolist() == [1, 0]


def test_official_reviews(tmp_path):
    for split, label, text in (("train", "pos", "good"), ("train", "neg", "bad"), ("test", "neg", "x" * 5000)):
        folder = tmp_path / "aclImdb" / split / label
        folder.mkdir(parents=True)
        (folder / "0_1.txt").write_text(text)
    rows = load_lra("lra_text", "train", data_dir=tmp_path)
    assert [row.tolist() for row in rows.inputs] == [byte_ids("bad").tolist(), byte_ids("good").tolist()]
    assert rows.labels.tolist() == [0, 1]
    home = r"The official files are from https://ai.stanford.edu/~amaas/data/sentiment/$"
    with pytest.raises(ValueError, match=rf"folders neg and pos of aclImdb; .*pos is missing\. {home}"):
        load_lra("lra_text", "test", data_dir=tmp_path)
    (tmp_path / "aclImdb" / "test" / "pos").mkdir()
    with pytest.raises(ValueError, match=rf"reviews of both labels \(\.txt\); .*pos has none\. {home}"):
        load_lra("lra_text", "test", data_dir=tmp_path)


def test_some_official_reviews_of_the_training_split_validate(tmp_path):
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            folder = tmp_path / "aclImdb" / split / label
            folder.mkdir(parents=True)
            for number in range(40):
                (folder / f"{number}_1.txt").write_text(f"{split} {label} {number}")

    def words(split):
        rows = load_lra("lra_text", split, data_dir=tmp_path)
        return [tuple(bytes(value - 3 for value in row).decode().split()) for row in rows.inputs]

    train, validation, test = map(words, SPLITS)
    assert (len(train), len(validation), len(test)) == (76, 4, 80)
    assert {split for split, _, _ in train + validation} == {"train"}
    assert len({*train, *validation}) == 80
    assert [label for _, label, _ in validation] == ["neg", "pos"] * 2
    assert train[::2] != sorted(train[::2])
    assert words("validation") == validation


def test_pairs_of_documents(tmp_path):
    folder = tmp_path / "lra_release" / "lra_release" / "tsv_data"
    folder.mkdir(parents=True)
    (folder / "new_aan_pairs.train.tsv").write_text('1.0\tA1\tB2\tone "text\tother\n0.0\tA1\tB3\t\tthird\n')
    rows = load_lra("lra_retrieval", "train", data_dir=str(tmp_path))  # as a text, too
    assert rows.inputs[0].tolist() == byte_ids('one "text').tolist()
    assert [row.tolist() for row in rows.pairs] == [byte_ids("other").tolist(), byte_ids("third").tolist()]
    assert rows.labels.tolist() == [1, 0]
    stand_in = tmp_path / "any.jsonl"
    stand_in.write_text('{"label": 2, "text1": "a", "text2": "b"}\n')
    with pytest.raises(ValueError, match=r"any.jsonl, row 1: the label must be an integer from 0 to 1; got 2"):
        list(read_pairs(stand_in))
    stand_in.write_text('{"label": 1, "text1": "a"}\n')
    with pytest.raises(ValueError, match="must have the columns label, text1 and text2; it lacks text2"):
        list(read_pairs(stand_in))


def official_pathfinder(tmp_path, count):
    folder = tmp_path / "lra_release" / "lra_release" / "pathfinder32" / "curv_contour_length_14"
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    images, labels = draw_pathfinder(count, split_generator(0, "train"))
    lines = []
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / "imgs" / "0" / f"sample_{number}.png")
        lines.append(f"imgs/0 sample_{number}.png {number} {label} 1.0 14 4 2 0.5 1 1\n")
    (folder / "metadata" / "0.npy").write_text("".join(lines))
    return folder, images, labels


def test_official_pathfinder(tmp_path):
    folder, images, labels = official_pathfinder(tmp_path, 10)
    train, test = (load_lra("lra_pathfinder", split, data_dir=tmp_path) for split in ("train", "test"))
    assert (np.stack(train.inputs) == images[:8].reshape(8, -1) / np.float32(127.5) - 1).all()
    assert [*train.labels, *test.labels] == [*labels[:8], labels[9]]
    with pytest.raises(ValueError, match="must have 16 x 16 pixels; got 32 x 32"):
        list(read_pathfinder(folder, size=16))
    (folder / "imgs" / "0" / "sample_3.png").write_bytes(b"")  # as in the published set
    assert len(list(read_pathfinder(folder))) == 9
    content = (folder / "imgs" / "0" / "sample_4.png").read_bytes()
    (folder / "imgs" / "0" / "sample_4.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"sample_4.png must be an image; it cannot be read"):
        list(read_pathfinder(folder))
    (folder / "imgs" / "0" / "sample_4.png").unlink()
    with pytest.raises(ValueError, match=r"0.npy, line 5: the image must exist; .*sample_4.png does not"):
        list(read_pathfinder(folder))


def test_official_path_x_has_its_size(tmp_path):
    folder = tmp_path / "lra_release" / "lra_release" / "pathfinder128" / "curv_contour_length_14"
    for name in ("metadata", "imgs"):
        (folder / name).mkdir(parents=True)
    image = np.random.default_rng(0).integers(256, size=(128, 128)).astype(np.uint8)
    (folder / "metadata" / "0.npy").write_text("".join(f"imgs one.png {number} 1\n" for number in range(10)))
    Image.fromarray(image).save(folder / "imgs" / "one.png")
    rows = load_lra("lra_pathx", "train", data_dir=tmp_path)
    assert (len(rows.inputs), len(rows.inputs[0])) == (8, LRA["lra_pathx"].length)
    assert (rows.inputs[0] == image.reshape(-1) / np.float32(127.5) - 1).all()
    Image.fromarray(image[:32, :32]).save(folder / "imgs" / "one.png")
    with pytest.raises(ValueError, match=r"one.png must have 128 x 128 pixels; got 32 x 32"):
        load_lra("lra_pathx", "train", data_dir=tmp_path)


def test_official_cifar10(tmp_path, caplog):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(256, size=(10, 3073)).astype(np.uint8)
    rows[:, 0] = range(10)
    for number in (1, 2):
        (folder / f"data_batch_{number}.bin").write_bytes(rows.tobytes())
    train, validation = (load_lra("lra_image", split, data_dir=tmp_path) for split in ("train", "validation"))
    assert "has 18 rows, and the published split 45000: files are missing" in caplog.text
    caplog.clear()
    load_lra("lra_image", "train", data_dir=tmp_path, count=18)
    assert not caplog.text  # as many as were asked for
    assert train.labels.tolist() == [*range(10), *range(8)]
    assert validation.labels.tolist() == [8, 9]
    red, green, blue = (rows[3, 1 + 1024 * colour : 1025 + 1024 * colour] for colour in range(3))
    # TensorFlow: integers to shares of 255, weights, and back by 255.5 and a cast
    grey = np.floor((0.2989 * (red / 255) + 0.587 * (green / 255) + 0.114 * (blue / 255)) * 255.5)
    # as Mega's command normalises it: --pixel-normalization 0.48 0.24
    np.testing.assert_allclose(train.inputs[3], (grey / 255 - 0.48) / 0.24, atol=1e-5)
    (folder / "test_batch.bin").write_bytes(rows.tobytes()[:-1])
    with pytest.raises(ValueError, match=r"test_batch.bin must be records of 3073 bytes; it has 30729 bytes"):
        list(read_cifar10(folder / "test_batch.bin"))


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_archives_of_images_and_recordings(tmp_path):
    labels = np.array([3, 0], np.uint8)
    images = np.array([[[0, 255]], [[255, 0]]], np.uint8)
    values, found = read_arrays(save(tmp_path / "train.npz", images=images, labels=labels), "images")
    assert [row.tolist() for row in values] == [[-1, 1], [1, -1]]
    assert found.tolist() == [3, 0]
    audio = np.array([0, 16384, -32768], np.int16)
    save(tmp_path / "test.npz", audio=audio, offsets=np.array([0, 1, 3]), labels=labels)
    rows = load_lra("lra_speech", "test", data_dir=tmp_path)
    assert [row.tolist() for row in rows.inputs] == [[0], [0.5, -1]]


def test_own_images_have_the_tasks_size_and_brightness(tmp_path):
    image = np.random.default_rng(0).integers(256, size=(1, 32, 32)).astype(np.uint8)
    save(tmp_path / "train.npz", images=image, labels=np.array([7]))
    (row,) = load_lra("lra_image", "train", data_dir=tmp_path).inputs
    np.testing.assert_allclose(row, (image.reshape(-1) / 255 - 0.48) / 0.24, atol=1e-5)
    assert row.dtype == np.float32
    for shape in ((32, 31), (16, 16), (64, 64)):
        save(tmp_path / "train.npz", images=np.zeros((1, *shape), np.uint8), labels=np.array([7]))
        got = f"train.npz: images must have 32 x 32 pixels, those of the task; got {shape[0]} x {shape[1]}"
        with pytest.raises(ValueError, match=got):
            load_lra("lra_image", "train", data_dir=tmp_path)


def test_slow_speech_is_the_means_of_eight_samples(tmp_path):
    audio = np.array([*[800] * 8, *[-1600] * 8, 1600, 0, 0, *[0] * 3], np.int16)
    save(tmp_path / "test.npz", audio=audio, offsets=np.array([0, 19, 22]), labels=np.array([3, 0], np.uint8))
    rows = load_lra("lra_speech_1000", "test", data_dir=tmp_path)
    np.testing.assert_allclose(rows.inputs[0], [0.5, -1, 0.125])  # the last eight are not all there
    assert rows.inputs[1].tolist() == [0]  # silence


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": [1]}, "must hold labels and images; it holds labels"),
        ({"images": [[[1.0]]], "labels": [1]}, "images must be uint8, (1, height, width); got float64, (1, 1, 1)"),
        (
            {"images": np.zeros((2, 1, 1), np.uint8), "labels": [1]},
            "images must be uint8, (1, height, width)",
        ),
        ({"images": np.zeros((1, 1, 1), np.uint8), "labels": [10]}, "labels must be integers from 0 to 9"),
        ({"audio": np.zeros(4, np.int16), "offsets": [0, 5], "labels": [1]}, "offsets must ascend to at most 4"),
        ({"audio": np.zeros(4), "offsets": [0, 4], "labels": [1]}, "audio must be int16 in one row; got float64"),
        ({"images": np.zeros((1, 0, 2), np.uint8), "labels": [1]}, "images must be uint8, (1, height, width)"),
        ({"audio": np.zeros(4, np.int16), "offsets": [0.0, 4.0], "labels": [1]}, "offsets must ascend to at most 4"),
        ({"audio": np.zeros(4, np.int16), "offsets": [-1, 4], "labels": [1]}, "offsets must ascend to at most 4"),
        (
            {"audio": np.zeros(4, np.int16), "offsets": np.array([0, 3, 2], np.uint64), "labels": [1, 1]},
            "offsets must ascend to at most 4",  # unsigned differences are positive
        ),
    ],
)
def test_archives_that_do_not_fit_are_refused(tmp_path, arrays, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_arrays(
            save(tmp_path / "a.npz", **{name: np.array(value) for name, value in arrays.items()}),
            "audio" if "audio" in arrays else "images",
        )


def test_an_archive_of_another_kind_is_refused(tmp_path):
    """Images are no sound, and sound cut at places is no image."""
    labels = np.array([3])
    save(tmp_path / "train.npz", images=np.zeros((1, 32, 32), np.uint8), labels=labels)
    with pytest.raises(ValueError, match="must hold labels and audio; it holds images, labels"):
        load_lra("lra_speech", "train", data_dir=tmp_path)
    save(tmp_path / "train.npz", audio=np.zeros(1024, np.int16), offsets=np.array([0, 1024]), labels=labels)
    with pytest.raises(ValueError, match="must hold labels and images; it holds audio, offsets, labels"):
        load_lra("lra_image", "train", data_dir=tmp_path)


def test_broken_archives_are_refused(tmp_path):
    path = save(tmp_path / "a.npz", labels=np.arange(3))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"a.npz must be a NumPy archive of arrays; it cannot be read"):
        read_arrays(path, "images")
    path.write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"a.npz must be a NumPy archive of arrays; it cannot be read"):
        read_arrays(path, "images")
    with pytest.raises(ValueError, match=r"data_dir must hold the file b.npz; .* is missing"):
        read_arrays(tmp_path / "b.npz", "images")


def entry(content, offset, value):
    """Change two bytes in both headers of an archive's first file: the local one and that of the directory."""
    changed = bytearray(content)
    for header, where in ((b"PK\x03\x04", offset), (b"PK\x01\x02", offset + 2)):
        place = content.index(header) + where
        changed[place : place + 2] = value.to_bytes(2, "little")
    return bytes(changed)


def test_damage_anywhere_in_an_archive_is_refused_by_name(tmp_path):
    """Also what zipfile, zlib and NumPy have errors of their own for."""
    path, labels = tmp_path / "a.npz", np.arange(6, dtype=np.uint8)
    np.savez_compressed(
        path, images=np.random.default_rng(0).integers(256, size=(6, 4, 4), dtype=np.uint8), labels=labels
    )
    content = path.read_bytes()
    damaged = [content[:size] for size in range(0, len(content), 11)]
    for place in range(0, len(content), 5):
        damaged.append(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
    damaged += [entry(content, 6, 1), entry(content, 8, 99), entry(content, 8, 14), entry(content, 8, 0)]
    errors = []
    for changed in damaged:
        path.write_bytes(changed)
        try:
            read_arrays(path, "images")
        except ValueError as error:
            errors.append(error)
    assert all("a.npz" in str(error) for error in errors)
    causes = {type(error.__cause__).__name__ for error in errors}
    assert causes >= {"BadZipFile", "error", "NotImplementedError", "RuntimeError", "EOFError"}  # zlib's is `error`


def test_what_is_no_text_is_refused_by_file_and_line(tmp_path):
    for name in ("neg", "pos"):
        (tmp_path / "aclImdb" / "train" / name).mkdir(parents=True)
        (tmp_path / "aclImdb" / "train" / name / "1_9.txt").write_text("fine")
    review = tmp_path / "aclImdb" / "train" / "pos" / "0_9.txt"
    review.write_bytes("good\nsch\xf6n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"0_9.txt, line 2: must be UTF-8; byte 8 is not \(invalid"):
        load_lra("lra_text", "train", data_dir=tmp_path)
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "0.npy").write_bytes(b"imgs one.png 0 1\nimgs \xff.png 1 1\n")
    with pytest.raises(ValueError, match=r"0.npy, line 2: must be UTF-8; byte 22 is not"):
        list(read_pathfinder(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('"text1": "a\\ud800", "text2": "b", "label": 1', "text1 must be text that UTF-8 can hold; character 1 is"),
        ('"text1": "a", "text2": null, "label": 1', "text2 must be a text; got none"),
        (f'"text1": "a", "text2": "b", "label": {10**400}', "the label must be an integer from 0 to 1; got 1000"),
    ],
)
def test_fields_that_hold_no_text_or_label_are_refused_by_row(tmp_path, fields, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text1": "a", "text2": "b", "label": 0}}\n{{{fields}}}\n')
    with pytest.raises(ValueError, match=f"a.jsonl, row 2: {message}"):
        list(read_pairs(path))


# ---- the table ----


@pytest.mark.parametrize("name", LRA)
def test_every_task_is_drawn_or_names_its_files(name, tmp_path):
    task = LRA[name]
    if task.draw is None:
        with pytest.raises(ValueError, match=f"{name} must have data_dir, the folder of .*(test|contour)"):
            load_lra(name, "test")
    else:
        rows = load_lra(name, "test", count=3)
        assert len(rows.inputs) == len(rows.labels) == 3
        assert all(len(row) <= task.length for row in rows.inputs)
        if task.vocab_size is None:
            assert all(np.abs(row).max() <= 1 for row in rows.inputs)
        else:
            assert all(row.min() > 0 and row.max() < task.vocab_size for row in rows.inputs)
            assert all(row.dtype == np.int16 for row in rows.inputs)  # 147,086 pairs of 4,000 bytes fit into memory
    with pytest.raises(ValueError, match=r"data_dir must (hold|be left out)"):
        load_lra(name, "train", data_dir=tmp_path)


def test_bad_names_are_refused():
    with pytest.raises(ValueError, match=r"task_name must be one of lra_listops, .*; got 'listops'"):
        load_lra("listops", "train")
    with pytest.raises(ValueError, match="split must be one of train, validation, test; got 'dev'"):
        load_lra("lra_listops", "dev")
    with pytest.raises(ValueError, match="count must be an integer of at least 1; got 0"):
        load_lra("lra_listops", "train", count=0)


def test_reviews_without_a_text_or_of_unknown_labels_are_refused(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a", "label": "so so"}\n')
    with pytest.raises(ValueError, match=r"train.jsonl, row 1: the label must be an integer from 0 to 1; got 'so so'"):
        list(read_reviews(path))
    path.write_text('{"text": "a", "label": 1}\n{"text": null, "label": 1}\n')
    with pytest.raises(ValueError, match=r"train.jsonl, row 2: text must be a text; got none"):
        list(read_reviews(path))


# ---- tokenizers, and rows that are kept ----


def test_tokenizers_give_the_ids_of_the_rows():
    rows = load_lra("lra_listops_200", "train", count=3)
    tokenizer = lra_tokenizer("lra_listops_200")
    for row in rows.inputs:
        text = " ".join(LISTOPS_TOKENS[place] for place in row)
        assert tokenizer(f"( {text} )")["input_ids"] == row.tolist()
    with pytest.raises(Exception, match="UNK"):
        tokenizer("[MAX 2 eleven ]")
    text = "".join(map(chr, range(0, 700, 3))) + " \n\t€漢🙂"
    by_bytes = lra_tokenizer("lra_text")
    assert by_bytes(text)["input_ids"] == byte_ids(text).tolist()
    assert by_bytes.decode(byte_ids(text)) == text
    assert (len(by_bytes), len(tokenizer)) == (LRA["lra_text"].vocab_size, LRA["lra_listops"].vocab_size)


def test_other_vocabularies_are_refused():
    check_tokenizer(lra_tokenizer("lra_retrieval"), "lra_text", "it")
    check_tokenizer(ByT5Tokenizer(extra_ids=0), "lra_text", "it")
    for tokenizer, name in ((byte_tokenizer(), "lra_text"), (lra_tokenizer("lra_text"), "lra_listops")):
        with pytest.raises(
            ValueError, match=f"--a b has another vocabulary than {name}, whose {LRA[name].vocab_size} "
        ):
            check_tokenizer(tokenizer, name, "--a b")


def test_drawn_rows_are_drawn_once(tmp_path, monkeypatch):
    wanted = load_lra("lra_listops_200", "test", count=4, seed=3)
    first = load_lra_once("lra_listops_200", "test", count=4, seed=3, cache_dir=str(tmp_path))
    monkeypatch.setattr(kept, "_draw_one", lambda *_, **__: pytest.fail("drawn again"))
    again = load_lra_once("lra_listops_200", "test", count=4, seed=3, cache_dir=str(tmp_path))
    for found in (first, again):
        assert [row.tolist() for row in found.inputs] == [row.tolist() for row in wanted.inputs]
        assert found.labels.tolist() == wanted.labels.tolist()
    with pytest.raises(pytest.fail.Exception, match="drawn again"):
        load_lra_once("lra_listops_200", "test", count=4, seed=4, cache_dir=str(tmp_path))
    monkeypatch.setattr(kept, "digest_of_drawn", lambda *_: "another generator")
    with pytest.raises(pytest.fail.Exception, match="drawn again"):
        load_lra_once("lra_listops_200", "test", count=4, seed=3, cache_dir=str(tmp_path))


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(tasks, "_SHARD", 3)


@pytest.mark.parametrize("name", some(["lra_listops_200", "lra_pathfinder_16"], "lra_listops_200"))
def test_rows_are_the_same_for_any_number_of_processes(name, tmp_path, small_parts):
    wanted = load_lra(name, "validation", count=8, seed=1)
    few = load_lra(name, "validation", count=4, seed=1)
    found = [
        load_lra_once(name, "validation", count=8, seed=1, cache_dir=str(tmp_path / str(number)), processes=number)
        for number in (1, 2)
    ]
    for rows in found:
        assert [row.tolist() for row in rows.inputs] == [row.tolist() for row in wanted.inputs]
        assert {row.dtype for row in rows.inputs} == {np.dtype(np.int16 if "listops" in name else np.float32)}
        assert rows.labels.tolist() == wanted.labels.tolist()
        assert [row.tolist() for row in rows.inputs[:4]] == [row.tolist() for row in few.inputs]
    assert len({row.tobytes() for row in wanted.inputs}) == 8  # each part has a seed of its own


def test_a_kept_part_that_is_broken_is_drawn_again(tmp_path, small_parts, monkeypatch, caplog):
    ask = partial(load_lra_once, "lra_listops_200", "test", count=7, cache_dir=str(tmp_path))
    wanted, draw, drawn = ask(), kept._draw_one, []
    (folder,) = (path for path in (tmp_path / "hf_hybrid" / "lra").iterdir() if path.is_dir())
    monkeypatch.setattr(kept, "_draw_one", lambda folder, shard: (drawn.append(shard[3]), draw(folder, shard)))
    middle, content = folder / "00001.npz", (folder / "00001.npz").read_bytes()
    flipped = [content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :] for place in (60, 150, 300)]
    for damaged in (b"", content[:100], *flipped, (folder / "00002.npz").read_bytes()):  # the last has another count
        middle.write_bytes(damaged)
        drawn.clear()
        rows = ask()
        assert drawn == [1]
        assert [row.tolist() for row in rows.inputs] == [row.tolist() for row in wanted.inputs]
        assert rows.labels.tolist() == wanted.labels.tolist()
    assert caplog.text.count("00001.npz cannot be read") == 6
    middle.write_bytes(b"")
    monkeypatch.setattr(kept, "_draw_one", lambda *_: middle.write_bytes(b""))
    with pytest.raises(
        ValueError, match=r"cache_dir must keep what is written to it; parts of .*lra_listops_200-test"
    ):
        ask()


def test_drawing_stops_between_parts_and_goes_on(tmp_path, small_parts, monkeypatch, capsys):
    ask = partial(load_lra_once, "lra_listops_200", "test", count=7, cache_dir=str(tmp_path))
    clock = iter((0.0, 9.0))  # the first part is always drawn
    monkeypatch.setattr(kept, "time", type("Clock", (), {"monotonic": lambda: next(clock)}))
    capsys.readouterr()
    with pytest.raises(DrawingStopped, match="lra_listops_200, test: 2 of 3 parts are drawn"):
        ask(until=5.0)
    assert re.search(r"Drawing lra_listops_200, test: .* 2/3 ", capsys.readouterr().err)
    (folder,) = (path for path in (tmp_path / "hf_hybrid" / "lra").iterdir() if path.is_dir())
    assert sorted(path.name for path in folder.iterdir()) == ["00000.npz", "00001.npz"]
    assert len(ask().labels) == 7
    assert ask(until=0.0).labels.tolist() == load_lra("lra_listops_200", "test", count=7).labels.tolist()
    with np.load(folder / "00002.npz") as part:
        assert (part["inputs"].dtype, part["labels"].dtype) == (np.int8, np.int8)
