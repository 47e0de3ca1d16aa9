"""A shared object that has names and nothing behind them, written byte by byte: no compiler is needed for it.

Python bindings load only where the native libraries that they name can be resolved. Every function here answers 0, which is how
TensorRT says that it does not start, so that the real bindings run up to there.

    page 0, read and execute     headers, hash table, symbols, strings, code
    page 1, read and write       the dynamic section: glibc writes addresses into it
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

PAGE = 0x1000
MACHINES = {"x86_64": (62, b"\x31\xc0\xc3"), "aarch64": (183, b"\x00\x00\x80\xd2\xc0\x03\x5f\xd6")}  # return 0
PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 4, 5, 6, 10, 11, 14
GLOBAL_FUNCTION = 0x12

__all__ = ["MACHINES", "write_stub"]


def write_stub(path: Path, functions: Sequence[str], machine: str) -> None:
    """Write an ELF file with these functions under the name of its file."""
    number, code = MACHINES[machine]
    strings, names = b"\0", []
    for text in (*functions, path.name):
        names.append(len(strings))
        strings += text.encode() + b"\0"
    count = len(functions) + 1  # symbol 0 is none
    hashes = struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)  # one bucket, one chain
    headers = 64 + 4 * 56
    symbols_at = headers + len(hashes) + -len(hashes) % 8
    strings_at = symbols_at + 24 * count
    code_at = strings_at + len(strings) + -len(strings) % 16
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", name, GLOBAL_FUNCTION, 0, 1, code_at, len(code)) for name in names[:-1]
    )
    dynamic = [(DT_HASH, headers), (DT_STRTAB, strings_at), (DT_SYMTAB, symbols_at), (DT_STRSZ, len(strings)), (DT_SYMENT, 24)]
    table = b"".join(struct.pack("<QQ", *entry) for entry in [*dynamic, (DT_SONAME, names[-1]), (0, 0)])

    def segment(kind: int, flags: int, start: int, size: int) -> bytes:
        return struct.pack("<IIQQQQQQ", kind, flags, start, start, start, size, size, PAGE if kind == PT_LOAD else 8)

    used = code_at + len(code)
    assert used <= PAGE, "too many names for one page"
    image = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, number, 1, 0, 64, 0, 0, 64, 56, 4, 0, 0, 0)
    image += segment(PT_LOAD, 5, 0, used) + segment(PT_LOAD, 6, PAGE, len(table))
    image += segment(PT_DYNAMIC, 6, PAGE, len(table)) + segment(PT_GNU_STACK, 6, 0, 0)
    for start, part in ((headers, hashes), (symbols_at, symbols), (strings_at, strings), (code_at, code), (PAGE, table)):
        image = image.ljust(start, b"\0") + part
    path.write_bytes(image)
