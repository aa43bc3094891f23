"""A block as people see it: one piece of text for each of its positions, and how sure the model is of each."""

import dataclasses
from collections.abc import Sequence

from oled_jax.decode.events import PassEvent
from oled_jax.text import TextCodec

MASKED, INSIDE_CHARACTER = "░", "·"
HIGH, MIDDLE = 0.9, 0.5  # confidence from which a token counts as sure, and as likely


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One position after a pass. kind: "masked", "prompt", "high", "middle" or "low"; new, edited: by this pass."""

    text: str
    kind: str
    new: bool = False
    edited: bool = False


def block_pieces(event: PassEvent, codec: TextCodec | None, mask_id: int, prompt_length: int) -> list[Piece]:
    """The pieces of the block that a pass left.

    Args:
      codec: of the model; None shows ids.
      prompt_length: positions of the whole sequence that were given.
    """
    tokens = event.tokens_after.tolist()
    texts = token_texts(tokens, codec, mask_id)
    given = prompt_length - event.block * len(tokens)
    pieces = []
    for offset, (token, text) in enumerate(zip(tokens, texts, strict=True)):
        if token == mask_id:
            pieces.append(Piece(text=MASKED, kind="masked"))
        elif offset < given or event.confidence is None:
            pieces.append(Piece(text=text, kind="prompt" if offset < given else "high"))
        else:
            edited = offset in event.edit_transfer
            new = edited or offset in event.mask_transfer
            kind = _kind(float(event.confidence[offset]))
            pieces.append(Piece(text=text, kind=kind, new=new, edited=edited))
    return pieces


def token_texts(tokens: Sequence[int], codec: TextCodec | None, mask_id: int) -> list[str]:
    """What each token adds to the text of the unmasked run that it is in.

    A token that ends inside a character shows a dot; the one that completes it shows the character.
    """
    if codec is None:
        return [f"{token} " for token in tokens]
    texts: list[str] = []
    run: list[int] = []
    shown = ""
    for token in tokens:
        if token == mask_id:
            run, shown = [], ""
            texts.append(MASKED)
            continue
        run.append(token)
        whole = codec.decode(run).rstrip("\ufffd")
        new = whole[len(shown) :]
        unfinished = not new and codec.decode([token]) != ""
        texts.append(INSIDE_CHARACTER if unfinished else new)
        shown = whole
    return texts


def _kind(confidence: float) -> str:
    return "high" if confidence >= HIGH else "middle" if confidence >= MIDDLE else "low"
