"""A learner without a browser: logs in to a hub, starts a seat, runs a cell in it."""

import asyncio
import json

import requests
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from tests.classroom.boards import until
from tests.patience import patience

CLASS_PASSWORD = "open sesame"  # a hub may require it for a new name


class Visitor:
    """A learner at a hub's address, "http://127.0.0.1:8001"."""

    def __init__(self, address, name, password="a-long-word"):
        self.address, self.name, self.password = address, name, password
        self.session = requests.Session()
        self.session.trust_env = False  # ignores this machine's proxy
        self.session.headers["Referer"] = f"{address}/hub/"

    def hub(self, method, path, **more):
        """The hub's answer to a request like those of its own pages."""
        crumb = self.session.cookies.get("_xsrf", path="/hub/")
        url, headers = f"{self.address}/hub/{path}", {"X-XSRFToken": crumb}
        limit = patience(60)
        return self.session.request(method, url, headers=headers, timeout=limit, **more)

    def lab(self, path, **more):
        """JupyterLab's answer to a request."""
        method, url = "POST" if more else "GET", f"{self.address}/user/{self.name}/{path}"
        return requests.request(method, url, headers=self.key, timeout=patience(60), **more)

    def ask_in(self, class_password=CLASS_PASSWORD):
        """Submit the login form; returns the hub's answer."""
        self.hub("GET", "login")
        words = {"username": self.name, "password": self.password, "class_password": class_password}
        return self.hub("POST", "login", data=words)

    def log_in(self):
        """Log in; returns the next page's text. A seat starts unless there is a choice to make."""
        page = self.ask_in()
        token = self.hub("POST", f"api/users/{self.name}/tokens", json={}).json()["token"]
        self.key = {"Authorization": f"token {token}"}
        return page.text

    def server(self):
        """The hub's record of the seat; {} without one."""
        return self.hub("GET", f"api/users/{self.name}").json()["servers"].get("", {})

    def start(self, **choices):
        """Start a seat with these choices."""
        answer = self.hub("POST", "spawn", data=choices)
        assert answer.ok and "spawn-pending" in answer.url
        self.wait()

    def wait(self):
        """Wait until JupyterLab answers."""

        def ready():
            server = self.server()
            assert server, "the seat has ended"
            return server["ready"]

        until(ready, 60)

    def stop(self):
        assert self.hub("DELETE", f"api/users/{self.name}/server").ok
        until(lambda: not self.server())

    def run(self, code, seconds=60):
        """Run a cell in a new kernel, which stays; returns what it prints."""
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
    replied = idle = False  # on two channels: output may come after the reply
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
