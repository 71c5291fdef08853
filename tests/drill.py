"""Commands of a drill: a launch whose parts are harmed, by the recipe and by chance of a seed.

launch RECIPE [--harm]       `slurm.launch`, but its trainers are followed by a look into the store; with --harm its extractor is `serve`
serve RECIPE                 `extract.serve`, which now and then publishes what nobody may train on
then_look RECIPE COMMAND…    COMMAND; if it ends well, wait until the store is empty and write `empty_after` beside the recipe
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from configs.load import load

HARM = {2: "cut", 5: "overwritten", 8: "nan_sent", 11: "nan_made", 14: "lost", 17: "full"}  # by number of the sample in its rank


def launch_drill(recipe: str, harm: str = "") -> int:
    from slurm import launch

    table, here = launch.role_table, [sys.executable, __file__]

    def role_table(*arguments):
        roles = {role.name: role for role in table(*arguments)}
        if harm:
            roles["extractor-0"] = replace(roles["extractor-0"], command=[*here, "serve", recipe])
        roles["trainers"] = replace(roles["trainers"], command=[*here, "then_look", recipe, *roles["trainers"].command])
        return list(roles.values())

    launch.role_table = role_table
    return launch.main([recipe])


def then_look(recipe: str, *command: str) -> int:
    from store.master_http import find_master, metrics

    if status := subprocess.run(command).returncode:
        return status if status > 0 else 128 - status
    config = load(recipe)
    began, url = time.monotonic(), find_master(config.store)[1]
    while any((left := metrics(url, 5))[name] for name in ("master_key_count", "master_allocated_bytes")):
        if time.monotonic() - began > 60:
            print(f"the store is not empty: {left}", file=sys.stderr)
            return 1
        time.sleep(0.1)
    Path(recipe).with_name("empty_after").write_text(str(time.monotonic() - began))
    return 0


def serve(recipe: str) -> int:
    from extract import engine_transformers
    from extract.serve import main
    from store.objects import Full
    from store.sample import put_sample

    def harmful(store, name, contract, token_ids, states):
        _, _, sequence, attempt = name.split("/")
        harm = HARM.get(int(sequence)) if attempt == "0" else None
        part = f"{name}/0"
        if harm == "full":
            raise Full("no room, says the drill")
        if harm in ("nan_sent", "nan_made"):
            states = states.clone()
            states[len(states) // 2, 1, 3] = float("nan")
        if harm == "nan_sent":
            with_nan(store, name, contract, token_ids, states)
        else:
            put_sample(store, name, contract, token_ids, states)
        if harm in ("cut", "overwritten", "lost"):
            store.remove([part])
        if harm in ("cut", "overwritten"):
            store.put(part, memoryview(bytes(states.nbytes - 64 * (harm == "cut"))))

    engine_transformers.put_sample = harmful
    return main([recipe])


def with_nan(store, name, contract, token_ids, states) -> None:
    """As `put_sample`, but of an engine that does not look."""
    from store.sample import Slice, bytes_of, checksum, publish

    data = bytes_of(states)
    store.put(f"{name}/0", data)
    piece = Slice(object=f"{name}/0", start=0, stop=len(states), codec="raw", bytes=data.nbytes, checksum=checksum(data))
    publish(store, name, contract, token_ids, [piece])


if __name__ == "__main__":
    sys.exit({"launch": launch_drill, "serve": serve, "then_look": then_look}[sys.argv[1]](*sys.argv[2:]))
