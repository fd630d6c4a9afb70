"""`megatron-rl watch` serves a run's report on the loopback interface, and the page follows the run."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import pytest
from browser import Browser, chromium
from talks import POLICY, keep_talks, talk

from megatron_rl.commands.watch import MOST_STRANGERS, open_server
from megatron_rl.main import main
from megatron_rl.run.metrics import Tracker

CONFIG = "run: {name: talks, seed: 7}\nroles: {solver: {model: {path: models/tiny}}}\n"
SAYS = 'return document.querySelector("header p").textContent;'
LOOK = """
  const answered = performance.getEntriesByType("resource").length;
  document.dispatchEvent(new Event("visibilitychange"));
  await until(() => performance.getEntriesByType("resource").length > answered);
"""


def log(run, iterations):
    tracker = Tracker(run.metrics)
    for i in iterations:
        tracker.log(i, "solver", {"reward/trained": i / 10}, iteration=i)


@pytest.fixture
def run(tmp_path):
    run = keep_talks(tmp_path, CONFIG, solver=[talk((POLICY, [3]), rewards={"outcome": 1.0})])
    log(run, range(3))
    return run


@pytest.fixture
def address(run, tmp_path):
    (tmp_path / "page").mkdir()
    with open_server(run.path, tmp_path / "page", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


def get(address):
    with urllib.request.urlopen(address) as answer:
        return answer.read().decode()


def test_the_report_is_written_again_only_when_the_run_has_gone_on(run, address, tmp_path):
    page = tmp_path / "page/report.html"
    first, version = get(address), get(f"{address}version")
    assert "3 solver" in first and "connect-src 'self'" in first and "</script>" in first
    written = page.stat().st_mtime_ns
    assert get(address) == first and page.stat().st_mtime_ns == written
    log(run, range(3, 5))
    assert get(f"{address}version") != version and "5 solver" in get(address)
    assert not (run.path / "report.html").exists()


def test_whoever_does_not_know_the_address_sees_nothing(address):
    assert address.startswith("http://127.0.0.1:") and len(address) > 60
    for wrong in (
        f"{address.rpartition('/')[0][:-5]}/",
        "/".join(address.split("/")[:3]) + "/",
        f"{address}report.html",
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(wrong)
        assert caught.value.code == 404


def test_faults_silent_connections_do_not_stop_the_page(address):
    """Every connection had a thread for ever: 1,000 that said nothing took the machine's threads and descriptors."""
    port, before = int(address.split(":")[2].partition("/")[0]), threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(300)]
        assert silent[0].recv(1) == b"", "the oldest one is closed"
        assert len(get(f"{address}version")) > 3
        end = time.monotonic() + 60
        while threading.active_count() - before > MOST_STRANGERS + 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert threading.active_count() - before <= MOST_STRANGERS + 2


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_a_file_and_a_port_that_cannot_be_used_are_refused(run, address, capsys):
    assert main(["watch", str(run.config)]) == 2
    assert "give the directory of a run or a sweep" in capsys.readouterr().err
    for port in ("70000", "-1", address.split(":")[2].partition("/")[0]):
        assert main(["watch", str(run.path), "--port", port]) == 2
        assert f"--port {port}: " in capsys.readouterr().err


def test_a_run_of_a_sweep_that_fails_is_seen(run, address, tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep.page").mkdir()
    run.path.rename(tmp_path / "sweep/one")
    with open_server(tmp_path / "sweep", tmp_path / "sweep.page", 0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        before = get(f"{server.address}version")
        (tmp_path / "sweep/one/summary.json").write_text('{"failed": "boom"}')
        assert get(f"{server.address}version") != before
        server.shutdown()


def test_a_run_that_is_gone_is_said_and_a_browser_that_leaves_is_not(run, address, capfd):
    shutil.rmtree(run.path)
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(address)
    assert caught.value.code == 500 and run.path.name in caught.value.read().decode()
    host, port = address.split("/")[2].split(":")
    with socket.create_connection((host, int(port))) as left:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets the connection
        left.sendall(f"GET /{address.split('/')[3]}/version HTTP/1.1".encode())
    assert get(f"{address}version") == "" and "Traceback" not in capfd.readouterr().err


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium here (Debian: apt-get install chromium)")
def test_the_page_follows_the_run_but_not_while_a_rollout_is_read(run, address, tmp_path):
    with Browser(tmp_path / "profile") as browser:
        browser.open(address)
        assert browser.run(SAYS).startswith("3 solver")
        browser.run(
            """
          await until(() => document.querySelector("#rollout-page > .sample") !== null);
          document.querySelector("#rollout-page > .sample").open = true;
          window.read = true;
        """
        )
        log(run, range(3, 5))
        before = len(browser.requests)
        browser.run(LOOK)
        asked = browser.requests[before:]
        assert asked and {one.rpartition("/")[2] for one in asked} == {"version"} and browser.run("return window.read;")
        browser.run('document.querySelector("#rollout-page > .sample").open = false; ')
        with browser.loading():
            browser.run('document.dispatchEvent(new Event("visibilitychange"));')
        assert browser.run(SAYS).startswith("5 solver") and browser.errors == []
