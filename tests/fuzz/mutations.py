"""Ways to damage a file, drawn from a seeded generator. Each says what it did, and what must hold of the file after it.

Rules: "any", it may open, with other numbers (changed weights are other weights); "same", if it opens its numbers are
those of the undamaged file, because a checksum covers what was touched or because it says nothing about numbers;
"refused", it must not open.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

Rule = Literal["any", "same", "refused"]
NUMBERS = [0, -1, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**63, 10**18, 10**400, 0.5, -0.5, 1e308, 1e-320]
NUMBERS += [float("nan"), float("inf"), -float("inf")]
WORDS = [
    "",
    " ",
    "\0",
    "a",
    "[SEP]",
    "<s>",
    "F16",
    "I64",
    "../../etc/passwd",
    "고양이",
    "\ud800",
    "x" * 70_000,
    "{}",
    "%s",
]
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2"}
DTYPES |= {"I8": "i1", "U8": "u1", "BOOL": "?"}


@dataclass(frozen=True)
class Damage:
    """What was done, in words, and what must hold afterwards."""

    words: str
    rule: Rule = "any"


# ---------------------------------------------------------------------------------------------------------------- bytes


def damage_bytes(data: bytes, random: Random) -> tuple[bytes, str]:
    """Flip, cut, repeat or overwrite some bytes."""
    if not data:
        return random.randbytes(9), "bytes where there were none"
    at = random.randrange(len(data))
    size = min(random.choice([1, 2, 4, 8, 64, 1000]), len(data) - at)
    match random.randrange(9):
        case 0:
            flipped = bytearray(data)
            for _ in range(random.choice([1, 1, 1, 3, 20])):
                flipped[random.randrange(len(data))] ^= 1 << random.randrange(8)
            return bytes(flipped), "bits flipped"
        case 1:
            return data[:at], f"cut at {at}"
        case 2:
            return data[:at] + data[at + size :], f"{size} bytes left out at {at}"
        case 3:
            return data[:at] + random.randbytes(size) + data[at:], f"{size} bytes put in at {at}"
        case 4:
            return data[: at + size] + data[at:], f"{size} bytes twice at {at}"
        case 5:
            filler = random.choice([b"\0", b"\xff", b"\x7f", b"\x80", b" "]) * size
            return data[:at] + filler + data[at + size :], f"{size} bytes of {filler[:1]!r} at {at}"
        case 6:
            number = random.choice([0, 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1])
            packed = struct.pack(random.choice("<>") + "I", number)
            return data[:at] + packed + data[at + 4 :], f"{number} at {at}"
        case 7:
            other = random.randrange(len(data))
            piece = data[other : other + size]
            return data[:at] + piece + data[at + len(piece) :], f"{len(piece)} bytes of {other} at {at}"
        case _:
            return data + random.choice([b"\0", random.randbytes(1000), data]), "bytes after the end"


# ----------------------------------------------------------------------------------------------------------------- JSON


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside a JSON value."""
    found: list[tuple[Any, Any]] = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        found += [(value, key), *_places(inner)]
    return found


def _strange(random: Random, old: Any) -> Any:
    numbers = [old * 2, old + 1, old - 1, -old - 1, 0, 1] if type(old) in (int, float) else []
    return random.choice(
        [
            lambda: random.choice(numbers or NUMBERS),
            lambda: random.choice(numbers or NUMBERS),
            lambda: random.choice(NUMBERS),
            lambda: random.choice(WORDS),
            lambda: random.choice([None, True, False, [], {}, [[]], {"": {}}]),
            lambda: [old] * random.choice([0, 1, 2, 3, 1000]),
            lambda: {"type": old},
            lambda: str(old) if not isinstance(old, str) else old[::-1],
            lambda: old[: len(old) // 2] if isinstance(old, (list, str)) else [old, old],
        ]
    )()


def damage_json(text: str, random: Random) -> tuple[str, str]:
    """Change one to three values, keys or lists; or the depth of the whole."""
    if random.random() < 0.02:
        depth = random.choice([60, 500, 100_000])
        return '{"a":' * depth + text + "}" * depth, f"nested {depth} deep"
    value = json.loads(text)
    said = []
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = _places(value)
        if not places:
            break
        names = sorted({key for _, key in places if isinstance(key, str)})  # each name as often as any other
        name = random.choice([*names, None]) if random.random() < 0.8 else None
        container, key = random.choice([place for place in places if name in (None, place[1])])
        said.append(f"{key!r:.40}: {_change(container, key, random)}")
    out = json.dumps(value, ensure_ascii=random.random() < 0.5)
    if random.random() < 0.03 and isinstance(value, dict) and value:
        key = random.choice(list(value))
        out = out[:-1] + f", {json.dumps(key)}: {json.dumps(_strange(random, value[key]))}}}"
        said.append(f"{key!r:.40} twice")
    return out, "; ".join(said)


def _change(container: Any, key: Any, random: Random) -> str:
    old = container[key]
    match random.randrange(6):
        case 0:
            del container[key]
            return "left out"
        case 1 if isinstance(container, dict):
            container[random.choice([str(key) + "_", str(key)[:-1], "type", *WORDS[:4]])] = container.pop(key)
            return "renamed"
        case 2 if len(container) > 1:
            other = random.choice(list(container) if isinstance(container, dict) else range(len(container)))
            container[key], container[other] = container[other], old
            return f"swapped with {other!r:.40}"
        case 3 if isinstance(container, list):
            container.insert(key, old)
            return "twice"
        case _:
            container[key] = _strange(random, old)
            return f"{old!r:.40} → {container[key]!r:.40}"


def reformat_json(text: str, random: Random) -> str:
    """The same value, written in another way."""
    value = json.loads(text)
    if isinstance(value, dict) and random.random() < 0.5:
        items = list(value.items())
        random.shuffle(items)
        value = dict(items)
    return json.dumps(value, indent=random.choice([None, 1, "\t"]), ensure_ascii=random.random() < 0.5) + "\n" * 3


# ------------------------------------------------------------------------------------------------ safetensors, captures


def split_tensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the data behind it."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join_tensors(header: str, data: bytes) -> bytes:
    text = header.encode(errors="surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def damage_tensors(data: bytes, random: Random) -> tuple[bytes, Damage]:
    """A safetensors file with other bytes, another header, or the same header written in another way."""
    header, body = split_tensors(data)
    match random.randrange(4):
        case 0:
            out, words = damage_bytes(data, random)
            return out, Damage(words)
        case 1:
            header["__metadata__"] = {"format": "pt", "note": random.choice(WORDS[:4])}
            text = reformat_json(json.dumps(header), random)
            return join_tensors(text, body), Damage("header written in another way", "same")
        case 2:
            words = _forge_entry(header, random)
            return join_tensors(json.dumps(header), body), Damage(words)
        case _:
            text, words = damage_json(json.dumps(header), random)
            return join_tensors(text, body), Damage(f"header: {words}")


def _forge_entry(header: dict[str, Any], random: Random) -> str:
    """Another dtype, shape or place of one tensor."""
    name = random.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    match random.randrange(3):
        case 0:
            entry["dtype"] = random.choice([*DTYPES, "F8_E4M3", "F4", "C64"])
        case 1:
            shape = entry["shape"]
            other = [shape[::-1], [*shape, 1], shape[1:], [0], [2**40, 2**40], [-1], [1] * 70, [int(np.prod(shape))]]
            entry["shape"] = random.choice(other)
        case _:
            begin, end = entry["data_offsets"]
            other = [[end, begin], [begin, end + 8], [0, 2**62], [begin + 4, end + 4], [-4, end], [0, 0], [begin]]
            entry["data_offsets"] = random.choice(other)
    return f"{name}: {json.dumps(entry)}"


def seal(entries: dict[str, Any], header: str, data: bytes) -> bytes:
    """A capture with right checksums and any content, as regard/lens/files/container.py lays it out."""

    def checksum(of: bytes) -> str:
        return blake2b(of, digest_size=32).hexdigest()

    before = '{"__metadata__":{"format":"regard capture","version":"1","header_blake2b":"'
    after = f'","data_blake2b":"{checksum(data)}","header":{json.dumps(header)}}}'
    after += "".join(f",{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries.items()) + "}"
    start, end = before.encode(), after.encode(errors="surrogatepass")
    length = (len(start) + 64 + len(end)).to_bytes(8, "little")
    return length + start + checksum(length + start + end).encode() + end + data


def damage_capture(data: bytes, random: Random) -> tuple[bytes, Damage]:
    """Damage that the checksums must find, or a forgery with right checksums."""
    if random.random() < 0.2:
        out, words = damage_bytes(data, random)
        return out, Damage(words, "same" if out == data else "refused")
    entries, body = split_tensors(data)
    header = entries.pop("__metadata__")["header"]
    match random.randrange(4):
        case 0:
            words = _forge_numbers(entries, bytearray(body), random)
            changed, said = words
            return seal(entries, header, changed), Damage(said)
        case 1:
            said = _forge_entry(entries, random)
            return seal(entries, header, body), Damage(f"sealed, {said}")
        case _:
            text, said = damage_json(header, random)
            return seal(entries, text, body), Damage(f"sealed, header: {said}")


def _forge_numbers(entries: dict[str, Any], body: bytearray, random: Random) -> tuple[bytes, str]:
    """Numbers that no call can have had, in one tensor."""
    name = random.choice(list(entries))
    begin, end = entries[name]["data_offsets"]
    kind = np.dtype(DTYPES[entries[name]["dtype"]])
    values = np.frombuffer(bytes(body[begin:end]), kind).copy()
    if not len(values):
        return bytes(body), "an empty tensor as it is"
    if kind.kind == "f":
        filler: Any = random.choice([np.nan, np.inf, -np.inf, -1.0, 1e30, -1e30, 0.0, 2.0])
    else:
        filler = random.choice([0, 1, 3, -1, -100, 2**31 - 1, 2**62, 255])
        filler = filler if kind.kind == "b" else int(np.array(filler % 2 ** (8 * kind.itemsize), "u8").astype(kind))
    with np.errstate(over="ignore"):
        values[random.choice([slice(None), slice(0, 1), slice(random.randrange(len(values)), None)])] = filler
    body[begin:end] = values.tobytes()
    return bytes(body), f"sealed, {name} is {filler}"


# ---------------------------------------------------------------------------------------------------------------- NumPy


def damage_npy(data: bytes, random: Random) -> tuple[bytes, str]:
    """Other bytes, or another header in front of the same numbers."""
    if random.random() < 0.4:
        return damage_bytes(data, random)
    size = int.from_bytes(data[8:10], "little")
    kinds = [
        "'<f8'",
        "'<f4'",
        "'|O'",
        "'<U9'",
        "'>f4'",
        "'<c16'",
        "'|V8'",
        "'<M8[s]'",
        "'|b1'",
        "[('a', '<f8')]",
        "3",
        "'<f16'",
    ]
    shapes = [
        "(6, 4)",
        "(24,)",
        "()",
        "(0,)",
        "(-1, 4)",
        "(10000000000,)",
        "(1000000, 1000000, 1000000)",
        "(6.0, 4)",
        "((6, 4))",
    ]
    shapes += ["(6, 4", "[6, 4]", "None", "(True, 24)", "(" * 200 + ")" * 200, "(6, 4)" + " " * 70_000]
    header = f"{{'descr': {random.choice(kinds)}, 'fortran_order': {random.choice(['False', 'True', '1'])}, "
    header += f"'shape': {random.choice(shapes)}, }}"
    version = random.choice([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"])
    text = header.encode() + b"\n"
    length = struct.pack(
        "<H" if version == b"\x01\x00" else "<I", len(text) & (0xFFFF if version == b"\x01\x00" else -1)
    )
    return b"\x93NUMPY" + version + length + text + data[10 + size :], f"header {header:.90}"


def damage_npz(data: bytes, random: Random) -> tuple[bytes, Damage]:
    """Other bytes, which zip's CRC-32 must find; or another archive."""
    choice = random.randrange(4)
    if choice == 0:
        out, words = damage_bytes(data, random)
        return out, Damage(words, "same")
    with zipfile.ZipFile(io.BytesIO(data)) as members:
        arrays = {name: members.read(name) for name in members.namelist()}
    if choice == 1:
        packing = random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
        return _zipped(arrays, packing), Damage("packed in another way", "same")
    if choice == 2:
        name = random.choice(list(arrays))
        arrays[name], words = damage_npy(arrays[name], random)
        if random.random() < 0.2:
            arrays[random.choice(["k.npy", "z.npy", "q", "q.npy/"])] = arrays[name]
        return _zipped(arrays, zipfile.ZIP_DEFLATED), Damage(f"{name}: {words}")
    forged = bytearray(_zipped(arrays, zipfile.ZIP_DEFLATED))
    words = []
    for mark, flags, size in ((b"PK\x01\x02", 8, 24), (b"PK\x03\x04", 6, 22)):
        at = forged.find(mark)
        number = random.choice([0, 1, 5, 2**31, 2**32 - 1])
        match random.randrange(3):
            case 0:
                forged[at + flags] |= 1
                words.append("encrypted")
            case 1:
                struct.pack_into("<H", forged, at + flags + 2, random.choice([1, 9, 12, 14, 99]))
                words.append("another compression")
            case _:
                struct.pack_into("<I", forged, at + size, number)
                words.append(f"{number} bytes")
    return bytes(forged), Damage(", ".join(words), "same")


def _zipped(arrays: dict[str, bytes], packing: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", packing) as members:
        for name, content in arrays.items():
            members.writestr(name, content)
    return out.getvalue()


# --------------------------------------------------------------------------------------------------------------- images


def png_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    return found


def png_file(chunks: list[tuple[bytes, bytes]]) -> bytes:
    sealed = [struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(sealed)


def damage_png(data: bytes, random: Random) -> tuple[bytes, Damage]:
    """Other bytes, which the chunks' CRCs must find; another size with a right CRC; bombs in the chunks beside."""
    match random.randrange(4):
        case 0:
            out, words = damage_bytes(data, random)
            return out, Damage(words, "same")
        case 1:
            chunks = png_chunks(data)
            zeros = zlib.compress(bytes(random.choice([10, 10**6, 6 * 10**7])))
            beside = random.choice([(b"tEXt", b"a\0b"), (b"zTXt", b"a\0\0" + zeros), (b"iCCP", b"a\0\0" + zeros)])
            beside = random.choice(
                [beside, (b"iTXt", b"a\0\1\0\0\0" + zeros), (b"acTL", struct.pack(">II", 2**31 - 1, 0))]
            )
            chunks.insert(random.randrange(1, len(chunks)), beside)
            rule: Rule = "any" if beside[0] == b"acTL" else "same"  # which says that there are other frames
            return png_file(chunks), Damage(f"a chunk {beside[0]!r} of {len(beside[1])} bytes", rule)
        case 2:
            chunks = png_chunks(data)
            wide, high, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[0][1])
            sizes = [1, 7, 300, 8000, 60_000, 2**17, 2**27, 2**31 - 1, 2**32 - 1, 0]
            wide, high = random.choice([wide, *sizes]), random.choice([high, *sizes])
            depth, colour = random.choice([depth, 1, 16]), random.choice([colour, 0, 3, 6])
            chunks[0] = (b"IHDR", struct.pack(">IIBBBBB", wide, high, depth, colour, *rest))
            if random.random() < 0.5 and wide * high <= 2**27:  # all of it is there, and black
                row = -(-wide * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour] * depth // 8) + 1
                if row * high <= 2**28:
                    chunks = [
                        *(c for c in chunks if c[0] not in (b"IDAT", b"IEND")),
                        (b"IDAT", zlib.compress(bytes(row * high), 1)),
                        (b"IEND", b""),
                    ]
            return png_file(chunks), Damage(f"{wide} × {high}, {depth} bits of colour {colour}")
        case _:
            chunks = png_chunks(data)
            at = random.randrange(len(chunks))
            content, words = damage_bytes(chunks[at][1], random)
            chunks[at] = (chunks[at][0], content)
            return png_file(chunks), Damage(f"chunk {at}: {words}")


# ----------------------------------------------------------------------------------------------------------------- text


def damage_lines(text: str, random: Random) -> tuple[str, str]:
    """A vocabulary or list of merges with lines left out, doubled, moved or strange."""
    lines = text.split("\n")
    at = random.randrange(len(lines))
    match random.randrange(5):
        case 0:
            del lines[at]
            return "\n".join(lines), f"line {at} left out"
        case 1:
            lines.insert(at, random.choice(lines))
            return "\n".join(lines), f"a line twice, at {at}"
        case 2:
            lines[at] = random.choice([word for word in WORDS if "\ud800" not in word])
            return "\n".join(lines), f"line {at} is {lines[at]!r:.20}"
        case 3:
            random.shuffle(lines)
            return "\n".join(lines), "lines in another order"
        case _:
            return "\n".join(lines[:at]), f"{at} lines"


def damage_file(path: Path, random: Random) -> Damage:
    """Damage one file where it lies, in a way that fits its kind."""
    data, suffix = path.read_bytes(), path.suffix
    if suffix == ".regard":
        data, damage = damage_capture(data, random)
    elif suffix == ".safetensors":
        data, damage = damage_tensors(data, random)
    elif suffix == ".npz":
        data, damage = damage_npz(data, random)
    elif suffix == ".npy":
        data, words = damage_npy(data, random)
        damage = Damage(words)
    elif suffix == ".png":
        data, damage = damage_png(data, random)
    elif suffix == ".json" and random.random() < 0.9:
        if random.random() < 0.1:
            data, damage = reformat_json(data.decode(), random).encode(), Damage("written in another way", "same")
        else:
            text, words = damage_json(data.decode(), random)
            data, damage = text.encode(errors="surrogatepass"), Damage(words)
    elif suffix == ".txt" and random.random() < 0.7:
        text, words = damage_lines(data.decode(), random)
        data, damage = text.encode(), Damage(words)
    else:
        data, words = damage_bytes(data, random)
        damage = Damage(words)
    path.write_bytes(data)
    return Damage(f"{path.name}: {' '.join(damage.words.split()):.200}", damage.rule)
