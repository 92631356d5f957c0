"""A learner's browser by hand: logs in to a hub, takes a seat, runs a cell in it."""

import asyncio
import json

import requests
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from tests.classroom.boards import until
from tests.patience import patience

CLASS_PASSWORD = "open sesame"  # which a hub may ask for with a new name


class Visitor:
    """Somebody at a hub's address, "http://127.0.0.1:8001"."""

    def __init__(self, address, name, password="a-long-word"):
        self.address, self.name, self.password = address, name, password
        self.session = requests.Session()
        self.session.trust_env = False  # no proxy of this machine
        self.session.headers["Referer"] = f"{address}/hub/"

    def hub(self, method, path, **more):
        """The hub's answer to a request as its own pages send it."""
        crumb = self.session.cookies.get("_xsrf", path="/hub/")
        url, headers = f"{self.address}/hub/{path}", {"X-XSRFToken": crumb}
        limit = patience(60)
        return self.session.request(method, url, headers=headers, timeout=limit, **more)

    def lab(self, path, **more):
        """JupyterLab's answer."""
        method, url = "POST" if more else "GET", f"{self.address}/user/{self.name}/{path}"
        return requests.request(method, url, headers=self.key, timeout=patience(60), **more)

    def ask_in(self, class_password=CLASS_PASSWORD):
        """The page that the hub answers with."""
        self.hub("GET", "login")
        words = {"username": self.name, "password": self.password, "class_password": class_password}
        return self.hub("POST", "login", data=words)

    def log_in(self):
        """The text of the page that comes then; where nothing is to be chosen, a seat starts."""
        page = self.ask_in()
        token = self.hub("POST", f"api/users/{self.name}/tokens", json={}).json()["token"]
        self.key = {"Authorization": f"token {token}"}
        return page.text

    def server(self):
        """What the hub says of the seat; {} without one."""
        return self.hub("GET", f"api/users/{self.name}").json()["servers"].get("", {})

    def start(self, **choices):
        """Takes a seat, of these choices."""
        answer = self.hub("POST", "spawn", data=choices)
        assert answer.ok and "spawn-pending" in answer.url
        self.wait()

    def wait(self):
        """Until JupyterLab answers."""

        def ready():
            server = self.server()
            assert server, "the seat has ended"
            return server["ready"]

        until(ready, 60)

    def stop(self):
        """Gives the seat back."""
        assert self.hub("DELETE", f"api/users/{self.name}/server").ok
        until(lambda: not self.server())

    def run(self, code, seconds=60):
        """What a cell prints in a kernel that stays."""
        kernel = self.lab("api/kernels", json={}).json()["id"]
        address = self.address.replace("http", "ws", 1)
        address += f"/user/{self.name}/api/kernels/{kernel}/channels"
        request = HTTPRequest(address, headers=self.key)
        return asyncio.run(asyncio.wait_for(printed(request, code), patience(seconds)))


async def printed(request, code):
    connection, text = await websocket_connect(request), ""
    header = {"msg_id": "1", "msg_type": "execute_request", "session": "1", "username": ""}
    content = {"code": code, "silent": False, "stop_on_error": True}
    message = {"header": header | {"version": "5.3"}, "parent_header": {}, "metadata": {}}
    await connection.write_message(json.dumps(message | {"content": content, "channel": "shell"}))
    replied = idle = False  # by two ways: what is printed may come after the reply
    while not (replied and idle):
        said = await connection.read_message()
        assert said is not None, "the seat has closed the connection while a cell ran"
        heard = json.loads(said)
        kind = heard["header"]["msg_type"]
        if kind == "stream":
            text += heard["content"]["text"]
        if kind == "error":
            text += "\n".join(heard["content"]["traceback"])
        replied |= kind == "execute_reply"
        if kind == "status" and heard["parent_header"].get("msg_id") == "1":
            idle |= heard["content"]["execution_state"] == "idle"
    return text
