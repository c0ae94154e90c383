"""A headless Chromium that opens a page and runs a script in it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Reports errors, and what the script returns, as an element of the dumped document.
HARNESS = """
<script>
addEventListener("load", async () => {
  const told = document.createElement("pre");
  let found;
  try {
    found = await (async () => { %s
    })();
  } catch (e) { problems.push(String(e.stack)); }
  told.id = "told";
  told.textContent = JSON.stringify({ found, problems });
  document.body.append(told);
});
</script>
"""
ERRORS = """
<script>
const problems = [];
addEventListener("error", (e) => problems.push(`${e.message} at ${e.lineno}`));
addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));
for (const kind of ["error", "warn"]) {
  console[kind] = (...x) => problems.push(x.join(" "));
}
</script>
"""


def chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def visit(page: Path, script: str, size: tuple[int, int] = (1440, 1000)) -> Any:
    """Opens a page without a network and runs the body of an async function in it.

    Returns what that returns. Raises AssertionError for any error on the console.
    """
    binary = chromium()
    assert binary is not None, "no chromium: skip the test"
    text = page.read_text(encoding="utf-8")
    text = text.replace("<head>", "<head>" + ERRORS, 1)
    text = text.replace("</body>", HARNESS % script + "</body>")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(text, encoding="utf-8")
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")
        offline = "--host-resolver-rules=MAP * ~NOTFOUND"
        ran = subprocess.run(
            [
                *(binary, *flags, offline, f"--user-data-dir={folder}/profile"),
                f"--window-size={size[0]},{size[1]}",
                *("--virtual-time-budget=20000", "--dump-dom", f"file://{file}"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    match = re.search(r'<pre id="told">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert match, f"the page did not answer: {ran.stderr[-2000:]}"
    told = json.loads(html.unescape(match[1]))
    assert not told["problems"], told["problems"]
    return told.get("found")
