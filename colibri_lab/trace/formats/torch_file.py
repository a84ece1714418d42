"""Tensors out of a `torch.save` file without torch, and without running anything that is in it.

The file is a zip of one pickle and one raw buffer per storage. The unpickler here knows three names (rebuild a tensor,
a typed storage, an ordered dict); any other name in the pickle is refused, so a hostile file cannot call anything.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import zipfile

import numpy as np

from ...errors import TraceError

_DTYPES = {"Double": "f8", "Float": "f4", "Half": "f2", "Long": "i8", "Int": "i4", "Short": "i2", "Char": "i1",
           "Byte": "u1", "Bool": "?", "BFloat16": "u2"}  # fmt: skip


def load_torch(path):
    """The saved object; tensors are numpy arrays (bfloat16 as raw uint16). Raises `TraceError` naming the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl"]
            if len(pickles) != 1:
                raise TraceError(f"{path}: expected one data.pkl inside a torch.save file, found {len(pickles)}")
            root = pickles[0][: -len("data.pkl")]
            order = archive.read(root + "byteorder") if root + "byteorder" in archive.namelist() else b"little"
            if order != b"little":
                raise TraceError(f"{path}: byte order {order.decode(errors='replace')}; only little-endian is read")
            return _Unpickler(archive, root, path).load()
    except (zipfile.BadZipFile, EOFError, KeyError, OSError) as error:
        raise TraceError(f"{path}: damaged torch.save file: {error}") from error
    except (pickle.UnpicklingError, ValueError, TypeError, IndexError, AttributeError, UnicodeDecodeError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: cannot read the pickle of this torch.save file: {error}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, root: str, path):
        super().__init__(io.BytesIO(_stored(archive, root + "data.pkl", path)))
        self._archive, self._root, self._path = archive, root, path

    def find_class(self, module: str, name: str):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild(self._path)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name.removesuffix("Storage") in _DTYPES:
            return "<" + _DTYPES[name.removesuffix("Storage")]
        raise TraceError(
            f"{self._path}: this file asks for {module}.{name}, which is not a tensor; "
            "it is not read, because doing so could run code from it"
        )

    def persistent_load(self, pid):
        kind, dtype, key, _device, count = pid
        if kind != "storage" or dtype not in {"<" + code for code in _DTYPES.values()}:
            raise TraceError(f"{self._path}: expected a tensor storage, found {kind!r} {dtype!r}")
        raw = _stored(self._archive, f"{self._root}data/{key}", self._path)
        if len(raw) < count * np.dtype(dtype).itemsize:
            raise TraceError(f"{self._path}: storage {key} holds {len(raw)} bytes, expected {count} values of {dtype}")
        return np.frombuffer(raw, dtype, count)


def _stored(archive: zipfile.ZipFile, name: str, path) -> bytes:
    """A member as it lies in the file. torch never compresses; not inflating keeps a small file from filling RAM."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise TraceError(f"{path}: {name} is compressed; expected a torch.save file, which stores plain bytes")
    return archive.read(name)


class _Rebuild:
    """Stands for `torch._utils._rebuild_tensor_v2`."""

    __slots__ = ("path",)

    def __init__(self, path):
        self.path = path

    def __call__(self, storage, offset, shape, stride, *_):
        reach = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        size = math.prod(shape)
        if min((offset, *shape, *stride)) < 0 or (size and reach > len(storage)) or size > len(storage):
            raise TraceError(f"{self.path}: tensor {shape} does not fit its storage of {len(storage)} values")
        strides = [step * storage.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, strides, writeable=False).copy()
