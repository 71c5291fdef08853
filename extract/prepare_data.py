"""Tokenises conversations and rollouts into the data set that training reads.

`python extract/prepare_data.py CONFIG --data FILE… --output DIR`

DIR is a data set of the `datasets` library with columns id, input_ids (int32) and loss_mask (uint8, 1: the verifier would
generate, or did generate, this token). Its data contract lies beside it; dropped rows and their causes are in drops.jsonl.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value

from configs.schema import Config, config_argument, parse
from extract.conversations import Dropped, Rollout, read_row
from extract.render import RenderError, load_tokenizer, stop_ids, template_hash, tokenizer_hash
from extract.supervise import Supervisor
from store.contract import DataContract
from store.verifier import VerifierError, text_config

FEATURES = Features({"id": Value("string"), "input_ids": List(Value("int32")), "loss_mask": List(Value("uint8"))})


def data_contract(config: Config, tokenizer) -> DataContract:
    return DataContract(
        tokenizer=tokenizer_hash(tokenizer),
        template=template_hash(tokenizer),
        length=config.data.length,
        seed=config.seed,
        filters={"min_supervised": config.data.min_supervised},
    )


def tokenise(row: object, supervisor: Supervisor, config: Config, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """input_ids int32 [T] and loss_mask uint8 [T] of one row. Raises Dropped."""
    item = read_row(row)
    if isinstance(item, Rollout):
        ids = np.array(item.prompt_ids + item.response_ids)
        mask = np.repeat(np.array([0, 1], np.uint8), [len(item.prompt_ids), len(item.response_ids)])
        if ids.max() >= vocab_size:
            raise Dropped("bad_ids", f"token {ids.max()}, the verifier has {vocab_size}")
    else:
        text, spans = supervisor.spans(item)
        encoding = supervisor.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        ids, mask = np.array(encoding.ids), supervisor.mask(text, spans, encoding)
    ids, mask = ids[: config.data.length].astype(np.int32), mask[: config.data.length]
    if mask.sum() < config.data.min_supervised:
        raise Dropped("few_supervised", f"{mask.sum()} tokens, data.min_supervised is {config.data.min_supervised}")
    return ids, mask


def read_lines(files: list[Path]) -> Iterator[tuple[str, object]]:
    """(where, row) of every line; a line that is not JSON is a Dropped."""
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield f"{file.name}:{number}", json.loads(line.decode())
                except UnicodeDecodeError as error:
                    yield f"{file.name}:{number}", Dropped("bad_utf8", str(error))
                except (ValueError, RecursionError) as error:
                    yield f"{file.name}:{number}", Dropped("bad_json", str(error))


def prepare(config: Config, files: list[Path], output: Path) -> Counter:
    """Write the data set; the count of rows by what became of them ("kept" or a cause)."""
    tokenizer = load_tokenizer(config.verifier)
    supervisor = Supervisor(tokenizer, stop_ids(config.verifier, tokenizer))
    vocab_size = text_config(config.verifier.path).get("vocab_size", len(tokenizer))
    counts, rows, drops = Counter(), [], []
    for where, row in read_lines(files):
        try:
            if isinstance(row, Dropped):
                raise row
            ids, mask = tokenise(row, supervisor, config, vocab_size)
        except Dropped as drop:
            counts[drop.cause] += 1
            drops.append({"row": where, "cause": drop.cause, "detail": drop.detail})
            continue
        counts["kept"] += 1
        rows.append({"id": str(row.get("id", where)), "input_ids": ids, "loss_mask": mask})
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    if rows:
        Dataset.from_list(rows, FEATURES).save_to_disk(partial)
        (partial / "drops.jsonl").write_text("".join(json.dumps(drop) + "\n" for drop in drops))
        (partial / "data_contract.json").write_text(data_contract(config, tokenizer).model_dump_json(indent=2))
        partial.rename(output)
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prepare_data", description=__doc__.splitlines()[0])
    config_argument(parser)
    parser.add_argument("--data", nargs="+", type=Path, required=True, metavar="FILE", help="JSONL of conversations or rollouts")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    args, config = parse(parser, argv)
    if missing := [file for file in args.data if not file.is_file()]:
        return _fail(f"--data {missing[0]}: no such file")
    if args.output.exists():
        return _fail(f"--output {args.output}: exists already")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        counts = prepare(config, args.data, args.output)
    except (RenderError, VerifierError) as error:
        return _fail(str(error))
    print(f"{args.output}: " + ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return 0 if counts["kept"] else _fail("no row was kept")


def _fail(message: str) -> int:
    print(f"prepare_data: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
