"""A GGUF file gives what is in it, or one error: no count in it makes us hold more than it has."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import make_model, sentencepiece_vocabulary, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_reference

from nanoengine.formats.gguf import convert_gguf
from nanoengine.formats.gguf_file import GgufFields, read_gguf

KINDS = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.BF16, KINDS.Q4_1])
def test_fields_and_tensors_are_those_that_the_package_reads(kind: KINDS, tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary(211, add_space_prefix=False)
    model = make_model("wide")
    model.resize_token_embeddings(len(vocabulary.tokens), mean_resizing=False)
    write_gguf(tmp_path / "m.gguf", model, vocabulary, kind=kind)
    reader = gguf.GGUFReader(str(tmp_path / "m.gguf"))
    fields, tensors = read_gguf(tmp_path / "m.gguf")
    theirs = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    assert fields.names() == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, list):
            kind_of = list if isinstance(value[0], str) else np.ndarray
            assert list(fields.need(name, kind_of)) == value, name
        else:
            assert fields.need(name, type(value)) == value, name
    assert [tensor.name for tensor in tensors] == [tensor.name for tensor in reader.tensors]
    for ours, their in zip(tensors, reader.tensors, strict=True):
        numbers = gguf.quants.dequantize(their.data, their.tensor_type)
        assert ours.shape == numbers.shape
        assert np.array_equal(ours.values(), numbers)


def test_every_type_of_a_field_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    values = {"uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 4 * 10**9}
    values |= {"int32": -(2**31), "float32": 0.5, "uint64": 2**63, "int64": -(2**62)}
    values |= {"float64": 1e300, "bool": True, "string": "é"}
    for name, value in values.items():
        getattr(writer, f"add_{name}")(name, value)
    for sub in ("INT8", "UINT16", "FLOAT32", "FLOAT64", "BOOL", "UINT64"):
        writer.add_key_value(
            sub, [1, 0, 1], gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType[sub]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields, tensors = read_gguf(tmp_path / "m.gguf")
    assert {name: fields.need(name, type(value)) for name, value in values.items()} == values
    for sub in ("INT8", "UINT16", "FLOAT32", "FLOAT64", "BOOL", "UINT64"):
        assert fields.need(sub, np.ndarray).tolist() == [1, 0, 1]
    assert tensors == []


def test_a_truncated_or_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"))
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 100, len(whole) // 10, len(whole) // 2, len(whole) - 100):
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated or no GGUF"):
            convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    with pytest.raises(ValueError, match=r"none\.gguf does not exist"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")


def _header(num_tensors: int = 0, num_fields: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _array(kind: int, count: int) -> bytes:
    return _text(b"a") + struct.pack("<IIQ", 9, kind, count)


MANY = 1 << 40


@pytest.mark.parametrize(
    "data",
    [
        _header() + _array(4, MANY),  # numbers
        _header() + _array(8, MANY),  # texts
        _header() + _array(9, MANY),  # arrays of arrays
        _header() + _array(7, MANY) + b"\0" * 64,
        _header(num_fields=MANY) + (_text(b"a") + struct.pack("<IB", 0, 1)),
        _header(num_tensors=MANY, num_fields=0),
        _header() + struct.pack("<Q", MANY) + b"a",  # the name of a field
        _header() + _text(b"a") + struct.pack("<IQ", 8, (1 << 64) - 1),
        _header() + (_text(b"a") + struct.pack("<IB", 0, 1)) * 2,
        _header(num_fields=2) + (_text(b"a") + struct.pack("<IB", 0, 1)) * 2,  # twice
        _header() + _text(b"a") + struct.pack("<I", 99),
        _header() + _text(b"\xff") + struct.pack("<IB", 0, 1),
        _header() + _text(b"general.alignment") + struct.pack("<II", 4, 0),
        _header(num_fields=0, version=1),
        _header(num_fields=0, version=3 << 24),  # of the other byte order
        _header(1, 0) + _text(b"t") + struct.pack("<IQQIQ", 2, MANY, MANY, 0, 0),
        _header(1, 0) + _text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0),
        _header(1, 0) + _text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0) + b"\0" * 99,  # of blocks
        _header(1, 0) + _text(b"t") + struct.pack("<IQIQ", 1, 4, 999, 0),
        _header(1, 0) + _text(b"t") + struct.pack("<IQIQ", 1, 4, 0, MANY),
        _header(1, 0) + _text(b"t") + struct.pack("<I", MANY >> 20) + b"\0" * 99,
    ],
)
def test_a_count_that_the_file_does_not_have_costs_nothing(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"m\.gguf"):
            convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """A Llama with byte-level tokens, one with SentencePiece's and a rope of factors, a Phi-3."""
    file = tmp_path_factory.mktemp("files") / "m.gguf"
    vocabulary = sentencepiece_vocabulary(add_eos_token=True)
    found = []
    for shape in ("llama-gqa-tied", "llama-3.1", "phi3-longrope"):
        model = make_model(shape)
        if shape != "llama-gqa-tied":
            model.resize_token_embeddings(len(vocabulary.tokens), mean_resizing=False)
        write_gguf(file, model, None if shape == "llama-gqa-tied" else vocabulary)
        found.append(file.read_bytes())
    return found


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_is_one_error_or_another_model(
    data: st.DataObject, files: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    whole = bytearray(files[data.draw(st.integers(0, 2))])
    header = whole.rindex(b".weight") + 60
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header))
        whole[place] = data.draw(st.integers(0, 255))
    (folder / "m.gguf").write_bytes(whole)
    try:
        convert_gguf(folder / "m.gguf", folder / "out")
    except ValueError as error:
        assert "m.gguf" in str(error)
        assert not (folder / "out").exists()


def test_a_tensor_of_a_type_that_cannot_be_widened_is_named(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_norm.weight.x": np.zeros(48, dtype=np.int8)}
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"), extra_tensors=tensors)
    found = {tensor.name: tensor for tensor in read_gguf(tmp_path / "m.gguf")[1]}
    with pytest.raises(ValueError, match="its type I8 is not supported"):
        found["blk.0.attn_norm.weight.x"].values()


def test_a_field_of_another_type_is_named() -> None:
    fields = GgufFields({"a": "x", "b": True, "c": 3, "d": [], "e": np.zeros(2)})
    for name, kind, said in (
        ("a", int, "a='x': must be an integer"),
        ("b", int, "b=True: must be an integer"),
        ("b", float, "b=True: must be a number"),
        ("c", str, "c=3: must be a text"),
        ("d", np.ndarray, "d=a list of 0: must be a list of numbers"),
        ("e", list, "e=a list of 2: must be a list of texts"),
        ("z", int, "the field z is missing"),
    ):
        with pytest.raises(ValueError, match=said):
            fields.need(name, kind)
    assert fields.need("c", float) == 3.0
    assert fields.get("z", int) is None
