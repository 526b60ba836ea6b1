"""Draws `docs/mapping.svg`: block tables of two forked sequences and the pool behind them, as the allocator made them.

    python docs/mapping.py

The scene is played on a real `BlockAllocator`; the drawing shows its state. A test asserts that the file is current.
"""

from __future__ import annotations

from pathlib import Path

from cupaged import BlockAllocator

OUT = Path(__file__).with_name("mapping.svg")
SIZE, BLOCKS = 4, 8
INK, GREY, EMPTY = "#24292f", "#8b949e", "#f0f2f4"
COLOURS = {"A": "#bfdbfe", "B": "#fed7aa", "AB": "#bbf7d0", "other": "#e2e5e9"}


def scene() -> BlockAllocator:
    """A prompt of 10 tokens among others, forked; then each fork gets a token of its own."""
    alloc = BlockAllocator(BLOCKS, SIZE)
    alloc.add_request("gone", 7)  # blocks 0 and 1
    alloc.add_request("A", 6)  # 2 and 3
    alloc.add_request("other", 3)  # 4
    alloc.free_request("gone")  # 0 and 1 wait at the end of the queue
    alloc.grow("A", 4)  # 5
    alloc.fork_request("A", ["B"])  # no block
    alloc.grow_batch(["A", "B"], 1)  # A writes first, so it gets a copy of 5 in 6; B writes in place
    alloc.check()
    return alloc


def box(x: int, y: int, width: int, height: int, fill: str, text: str = "", size: int = 13, colour: str = INK) -> str:
    label = (
        f'<text x="{x + width / 2:g}" y="{y + height / 2 + size * 0.36:g}" font-size="{size}" fill="{colour}" '
        f'text-anchor="middle">{text}</text>'
    )
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="{INK}"/>' + (
        label if text else ""
    )


def words(
    x: int, y: int, text: str, size: int = 13, colour: str = INK, anchor: str = "start", weight: str = "normal"
) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}">{text}</text>'


def draw(alloc: BlockAllocator) -> str:
    """The picture as SVG."""
    owners: dict[int, str] = {}
    held: dict[int, list[str]] = {}
    for name in ("A", "B", "other"):
        for column, block in enumerate(alloc.tables[name]):
            owners[block] = "AB" if name == "B" and owners.get(block) == "A" else name
            filled = min(SIZE, alloc.lengths[name] - column * SIZE)
            prime = "&#8242;" if name == "B" else ""  # B's own 11th token is another one than A's
            held[block] = [f"t{column * SIZE + i}" + (prime if column * SIZE + i == 10 else "") for i in range(filled)]
            if name == "other":
                held[block] = ["..."] * filled
    parts = [
        words(30, 36, "block tables", 16, weight="bold"),
        words(520, 36, f"pool: {BLOCKS} blocks of {SIZE} slots", 16, weight="bold"),
    ]

    def top_of(block: int) -> int:
        return 56 + block * 42

    for block in range(BLOCKS):
        y, owner = top_of(block), owners.get(block)
        parts.append(words(508, y + 21, str(block), 14, INK, "end", "bold"))
        for slot in range(SIZE):
            there = held.get(block, [])
            full = slot < len(there)
            fill = COLOURS[owner] if owner and full else EMPTY if owner else "#ffffff"
            parts.append(box(520 + slot * 56, y, 56, 30, fill, there[slot] if full else "", 13))
        note = {
            "AB": "A and B, two owners",
            "A": "A: its own copy of the tail",
            "B": "B: written in place",
            "other": "another sequence",
        }
        parts.append(words(756, y + 20, note[owner] if owner else "free", 12, INK if owner else GREY))
    for i, name in enumerate(("A", "B")):
        top = 84 + i * 152
        parts.append(words(110, top - 10, f"sequence {name}: {alloc.lengths[name]} tokens", 14))
        for column, block in enumerate(alloc.tables[name]):
            y = top + column * 36
            parts.append(words(100, y + 20, f"logical {column}", 12, GREY, "end"))
            parts.append(box(110, y, 110, 30, COLOURS["AB" if owners[block] == "AB" else name], f"block {block}", 14))
            end = top_of(block) + 15 + (4 if i else -4)
            parts.append(
                f'<path d="M 220 {y + 15} C 330 {y + 15}, 390 {end}, 488 {end}" fill="none" '
                f'stroke="{("#2563eb", "#ea580c")[i]}" stroke-width="1.6" marker-end="url(#arrow{i})"/>'
            )
    slot = alloc.physical_slot("A", 10)
    parts.append(
        words(
            30,
            372,
            f"slot of t10 in A = table[10 // {SIZE}] * {SIZE} + 10 % {SIZE} = {alloc.tables['A'][2]} * {SIZE} + 2 = {slot}",
            13,
        )
    )
    arrows = "".join(
        f'<marker id="arrow{i}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{colour}"/></marker>'
        for i, colour in enumerate(("#2563eb", "#ea580c"))
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 950 400" font-family="Helvetica, Arial, sans-serif">'
        f'<defs>{arrows}</defs><rect width="950" height="400" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    OUT.write_text(draw(scene()))
    print(OUT)
