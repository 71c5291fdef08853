"""Are the states that a run was trained on those of a Hugging Face forward? `python -m train.compare CONFIG [--rows N]`

Reads them from the durable cache, so the run had `store.keep`. Another engine computes in another order: checksums differ then,
and the distance says by how much.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice

from configs.command import command
from configs.load import ConfigError, parse
from configs.schema import Config
from extract.hf import HFVerifier
from store.cache import DurableCache
from store.contract import StateContract
from store.dataset import Dataset
from store.sample import bytes_of, checksum
from train import checkpoint


def compare(config: Config, rows: int) -> str:
    """One line about the first `rows` rows. Raises ConfigError, FileNotFoundError: there are no states to compare."""
    if not config.store.keep or (folder := checkpoint.latest(config.run_dir / "checkpoints")) is None:
        raise ConfigError(f"run_dir {config.run_dir}: no checkpoint of a run with store.keep")
    contract = StateContract.model_validate(checkpoint.read_record(folder)["states"])
    cache = DurableCache(config.store.cache_path, config.store.cache_bytes)
    verifier = HFVerifier(config.verifier.path, config.verifier.dtype, contract.taps, config.verifier.trust_remote_code)
    dataset = Dataset(config.data.path)
    samples = tokens = equal = 0
    worst = total = 0.0
    for record in islice(dataset, rows):
        token_ids = record["input_ids"].tolist()
        ours = verifier.prefill([token_ids])[0].contiguous()
        theirs = ours.new_empty(ours.shape)
        if cache.get_into(contract, token_ids, theirs):
            equal += checksum(bytes_of(ours)) == checksum(bytes_of(theirs))
            distance = ((theirs - ours).double().norm(dim=-1) / ours.double().norm(dim=-1)).flatten()
            worst, total = max(worst, float(distance.max())), total + float(distance.mean()) * len(token_ids)
            samples, tokens = samples + 1, tokens + len(token_ids)
    if not samples:
        raise ConfigError(f"store.cache_path {config.store.cache_path}: holds none of the first {rows} rows")
    return (
        f"{samples} samples of {tokens:,} tokens by {contract.engine['name']} {contract.engine['version']}: {equal} have the checksum of "
        f"a Hugging Face forward; a state's distance from it (L2 over L2) is {total / tokens:.1e} on average and {worst:.1e} at most"
    )


@command("train.compare", ValueError)
def main() -> None:
    parser = argparse.ArgumentParser(prog="train.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="of the data set (default: %(default)s)")
    args, config = parse(parser)
    print(compare(config, args.rows))


if __name__ == "__main__":
    sys.exit(main())
