"""Pages in a real browser: Chromium without a window, asked by a script that the page is given."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
]
# The page is the document of a frame of the wanted width: a window of its own is never as narrow as a telephone.
HOST = """<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><body>
<iframe style="border:0;width:{width}px;height:900px"
srcdoc="{page}"></iframe><script>
addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument;
  const found = document.createElement("pre");
  found.id = "found";
  try {{ found.textContent = JSON.stringify((() => {{ {script} }})()); }}
  catch (error) {{ found.textContent = JSON.stringify({{error: String(error)}}); }}
  document.body.replaceChildren(found);
}});
</script></body>"""


def chromium() -> str | None:
    """Returns the browser's program; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


def look(page: str, script: str, directory: Path, *, width: int, dark: bool = False):
    """Opens a page at a width and runs a script, in which `page` is its document. -> what the script returns."""
    directory.mkdir(parents=True)
    host = directory / "host.html"
    host.write_text(HOST.format(width=width, page=html.escape(page), script=script), encoding="utf-8")
    mode = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    words = [chromium(), *FLAGS, *mode, f"--user-data-dir={directory / 'profile'}", "--dump-dom", host.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    shown = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert shown is not None, done.stderr[-2000:]
    return json.loads(html.unescape(shown[1]))
