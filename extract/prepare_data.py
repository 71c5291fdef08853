"""Tokenises conversations and rollouts into the data set that training reads.

`python extract/prepare_data.py CONFIG --data FILE… [--output DIR]`. FILE is JSON lines, a JSON array, Parquet, a data set's folder
or its hub id (`id:split`), each with a weight where wanted (`file.jsonl@0.5`). DIR is a data set of the `datasets` library with
columns id, input_ids (int32) and loss_mask (uint8, 1: the verifier would generate, or did generate, this token); held-out
prompts lie in DIR/validation and as rollouts in DIR/held_out.jsonl. A run that was killed goes on when it is started again; with
`--shard i/n` machines share the work, and the same command without it then puts the parts together.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from itertools import chain
from pathlib import Path

from rich.console import Console

from configs.command import command
from configs.load import parse
from configs.schema import Config
from extract.command import Progress, shard
from extract.conversations import Dropped
from extract.merge import VALIDATION, merge
from extract.parts import Maker, make_parts
from extract.render import template_hash, tokenizer_hash
from extract.report import show, write_report
from extract.rows import DataError, Source, chunks
from store.contract import ContractMismatch, DataContract, require_same
from store.files import try_lock, write

CONTRACT = "data_contract.json"
RECORD = "prepared.json"  # sources, and the files that this tool wrote: those alone it removes
WORK = ".parts"


def data_contract(config: Config, maker: Maker) -> DataContract:
    return DataContract(
        tokenizer=tokenizer_hash(maker.tokenizer),
        template=template_hash(maker.tokenizer),
        length=config.data.length,
        seed=config.seed,
        filters=config.data.model_dump(include={"min_supervised", "turns", "cut", "validation"}),
    )


def prepare(config: Config, sources: list[Source], output: Path, shard: tuple[int, int] = (0, 1), overwrite: bool = False) -> str:
    """Make the data set `output`, or one shard of its parts; a line that says what became of the rows.

    Raises DataError (unreadable data, a folder of something else, no row kept), ContractMismatch, RenderError, VerifierError.
    """
    maker = Maker(config)
    contract = data_contract(config, maker)
    record = {"sources": [[source.path, source.weight, source.nbytes] for source in sources]}
    if not _begin(output, contract, record, overwrite):
        return "complete already; --overwrite makes it again"
    work = output / WORK
    progress = Rows(sources)
    parts = make_parts(config, maker, sources, work, shard, progress)
    if shard[1] > 1:
        return f"shard {shard[0]}/{shard[1]} is done; run without --shard when all are"
    with (work / "lock").open("w") as lock:
        if not try_lock(lock):
            raise DataError(f"{output} is being put together by another process")
        result = work / "result"
        shutil.rmtree(result, ignore_errors=True)  # of a run that was killed here
        result.mkdir()
        progress.say(f"putting {len(parts):,} parts together")
        summary = merge(parts, sources, config, maker.vocab_size, result)
        line = write_report(summary, config.data, result)
        _publish(result, output, contract, record)
    if not summary.training:
        raise DataError(f"no row was kept for training: {line}; see {output / 'drops.jsonl'}")
    return line


def _begin(output: Path, contract: DataContract, record: dict, overwrite: bool) -> bool:
    """Make the work folder; False where the data set is complete. Another data set is refused, and so is a stranger's folder."""
    ours = [file for file in (output / CONTRACT, output / WORK / CONTRACT) if file.exists()]
    if output.exists() and not ours and not (output / RECORD).exists() and (found := sorted(path.name for path in output.iterdir())):
        raise DataError(f"{output} holds files that this tool did not write: {', '.join(found[:3])}")
    for file in ours:
        try:
            require_same(contract, DataContract.read(file), f"{output} was made otherwise (--overwrite makes it again)")
        except ContractMismatch:
            if not overwrite:
                raise
            shutil.rmtree(output / WORK, ignore_errors=True)
    if (output / CONTRACT).exists() and not overwrite:
        if json.loads((output / RECORD).read_text())["sources"] != record["sources"]:
            raise DataError(f"{output} was made of other data (--overwrite makes it again)")
        return False
    (output / WORK).mkdir(parents=True, exist_ok=True)
    write(output / WORK / CONTRACT, contract.model_dump_json(indent=2))
    return True


def _publish(result: Path, output: Path, contract: DataContract, record: dict) -> None:
    """Put the files in the place of those of an earlier run, the contract last: with it the data set is complete."""
    if (output / RECORD).exists():
        for name in reversed(json.loads((output / RECORD).read_text())["files"]):  # the contract first
            (output / name).unlink(missing_ok=True)
        if (output / VALIDATION).is_dir() and not any((output / VALIDATION).iterdir()):
            (output / VALIDATION).rmdir()
    files = sorted((path for path in result.rglob("*") if path.is_file()), key=lambda path: (path.name == "state.json", path))
    names = [str(path.relative_to(result)) for path in files]
    write(output / RECORD, json.dumps(record | {"files": [*names, RECORD, CONTRACT]}, indent=2))
    for path, name in zip(files, names, strict=True):
        (output / name).parent.mkdir(exist_ok=True)
        os.replace(path, output / name)
    if (output / "state.json").exists():
        write(output / CONTRACT, contract.model_dump_json(indent=2))
        shutil.rmtree(output / WORK)


class Rows(Progress):
    def __init__(self, sources: list[Source]):
        super().__init__()
        sizes = [source.nbytes for source in sources if not source.path.endswith((".parquet", ".gz", ".zst"))]
        self.total = sum(sizes) if len(sizes) == len(sources) and None not in sizes else None  # known where nothing is compressed
        self.rows = self.bytes = 0

    def __call__(self, rows: int, nbytes: int) -> None:
        self.rows, self.bytes = self.rows + rows, self.bytes + nbytes
        share = self.bytes / self.total if self.total else 0.0
        self.tell(f"{self.rows:,} rows, {self.rows / self.seconds():,.0f} a second" + (f", {share:.0%}" if share else ""), share)


def print_rows(config: Config, sources: list[Source], number: int) -> None:
    """Print the first rows that are kept, supervised tokens in colour; dropped ones with their cause."""
    maker, console = Maker(config), Console(highlight=False, soft_wrap=True)
    for chunk in chain.from_iterable(map(chunks, sources)):
        for at, row in chunk.parse():
            title = f"{chunk.source.name}:{at}"
            [made] = maker.rows([row])
            if isinstance(made, Dropped):
                console.print(f"{title}: dropped, {made}", style="yellow", markup=False)
                continue
            show(console, title, [maker.tokenizer.decode([token]) for token in made.ids], made.mask)
            if not (number := number - 1):
                return


@command("prepare_data")
def main(argv: list[str] | None = None) -> int | None:
    parser = argparse.ArgumentParser(prog="prepare_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE[@WEIGHT]", help="conversations or rollouts")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: data.path of CONFIG")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="i/n", help="make this part of the parts only, i from 0")
    parser.add_argument("--overwrite", action="store_true", help="remove what this tool wrote to DIR before")
    parser.add_argument("--show", type=int, metavar="N", help="print N rows, supervised tokens in colour, and write nothing")
    args, config = parse(parser, argv)
    if args.show is not None and args.show < 1:
        parser.error(f"--show {args.show}: rows to print, from 1")
    output = args.output or config.data.path
    try:
        sources = [Source.parse(text) for text in args.data]
        if args.show:
            print_rows(config, sources, args.show)
        else:
            print(f"{output}: {prepare(config, sources, output, args.shard, args.overwrite)}")
    except KeyboardInterrupt:
        print("prepare_data: stopped; run again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
