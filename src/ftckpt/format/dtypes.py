"""Torch dtypes by name: their item size, and the safetensors dtype they are stored as. Never imports torch."""

from __future__ import annotations

from ftckpt.errors import Unstorable

# Only what safetensors 0.5 knew: a reader refuses a whole file for one dtype that it does not know.
SAFETENSORS_DTYPES: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}

_SUB_BYTE = [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]  # torch keeps one of these per byte

_ITEM_BYTES: dict[str, int] = {
    "complex128": 16,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "complex32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "bits16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits8": 1,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    **dict.fromkeys(_SUB_BYTE, 1),
}


def known_dtype(dtype: str) -> bool:
    """Whether a torch dtype of this name can be stored."""
    return dtype in _ITEM_BYTES


def item_bytes(dtype: str, where: str = "") -> int:
    """Bytes of one item of a torch dtype.

    Args:
        dtype: torch's name without ``torch.``: "bfloat16".
        where: key of the tensor, for the message.

    Raises:
        Unstorable: a quantized dtype (its scales are not in its bytes), or one that this release does not know.
    """
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        raise Unstorable(
            f"{where or 'a tensor'} has dtype {dtype}, which cannot be stored",
            now="nothing was written",
            todo="store its dequantized or integer form" if dtype.startswith("q") else "cast it, or use a newer ftckpt",
        ) from None
