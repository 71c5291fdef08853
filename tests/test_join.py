"""An extractor of its own that joins a run elsewhere (`slurm.launch --join`)."""

from __future__ import annotations

import json
import sys

from processes import end_of, wait_for

from slurm.follow import write_status

STUB = """\
#!{python} -u
import http.server, json, os, signal, sys
from pathlib import Path
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    do_POST = do_GET
server, file = http.server.HTTPServer(("127.0.0.1", 0), Answer), Path({run!r}) / "extractors" / (os.environ["EXTRACTOR"] + ".json")
signal.signal(signal.SIGTERM, lambda *_: (file.unlink(), os._exit(0)))
file.parent.mkdir(exist_ok=True)
record = file.with_suffix(".partial")
record.write_text(json.dumps({{"url": f"http://127.0.0.1:{{server.server_port}}", "pid": os.getpid()}}))
record.replace(file)
server.serve_forever()
"""


def test_a_joined_extractor_comes_along(tree, tmp_path):
    """It begins anew when the run is started again (whose store is another one then), and ends with the run."""
    run, stub = tmp_path / "run", tmp_path / "extractor"
    stub.write_text(STUB.format(python=sys.executable, run=str(run)))
    stub.chmod(0o755)
    recipe, sections = tmp_path / "recipe.yaml", {"verifier": {"path": "none"}, "data": {"path": "none"}, "store": {"path": "none"}}
    draft = {"taps": [1], "mask_token_id": 1}
    recipe.write_text(json.dumps(sections | {"run_dir": str(run), "draft": draft, "python": {"extract": str(stub)}}))
    write_status(run, {"state": "submitted"})
    process = tree.python("-m", "slurm.launch", "--join", recipe)

    def pid(but: int = 0) -> int:
        files = list((run / "extractors").glob("joined-*.json"))
        found = json.loads(files[0].read_text())["pid"] if files and files[0].exists() else 0
        return found if found != but else 0

    write_status(run, {"state": "running", "job": "1", "restart": 0, "pid": 1})
    first = wait_for(pid, 60)
    write_status(run, {"state": "requeued", "job": "1", "restart": 0, "pid": 1})
    wait_for(lambda: not list((run / "extractors").iterdir()), 60)
    write_status(run, {"state": "starting", "job": "1", "restart": 1, "pid": 2})
    wait_for(lambda: pid(but=first), 60)
    write_status(run, {"state": "done", "job": "1", "restart": 1, "pid": 2})
    status, _, err = end_of(process, 60)
    assert status == 0 and err.count("is ready") == 2, err
    tree.assert_gone()
