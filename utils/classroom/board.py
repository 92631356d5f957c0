"""The board's pages and routes: an ASGI application on Starlette.

    GET  /join/TOKEN         a page for a learner's browser; for a lab the class's name
    POST /report             a message of a lab (reports.py), with the join token
    GET  /board/TOKEN        lets the instructor's browser in, by a cookie
    GET  /                   the page; /page.css, /page.js
    GET  /events             server-sent events: the room, then its changes
    GET  /histogram?name=…   predictions; &reveal=1 with theory and measurement
    GET  /results.csv        a row for each learner and exercise
    POST /minutes            {"minutes": 45 or null}: until the end
    POST /helped             {"learner": 3}: the instructor has helped
    POST /removed            {"learner": 3}: no longer shown, whatever that lab reports

After WRONG wrong tokens from one address in a minute, further ones are answered with 429. A right
one always passes: many learners share an address, and all seats of a hub do.
"""

import asyncio
import contextlib
import csv
import hashlib
import hmac
import html
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from utils.classroom import reports
from utils.classroom.reports import Refused
from utils.classroom.room import Room, Watcher
from utils.classroom.store import Full, Store, StoreError

HERE = Path(__file__).parent
BODY_SECONDS = 5.0  # in which a request must arrive
SMALL = 1024  # bytes of a request of the page
WRONG, MINUTE = 20, 60.0  # wrong tokens, and the seconds in which they count, per address
ADDRESSES = 10_000  # remembered for this
BEAT = 0.4  # seconds between two events, at least
SILENCE = 10.0  # and at most
LONGEST = 24 * 60  # minutes

SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
NOTE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>{title}</title>
<link rel="stylesheet" href="{up}page.css"><main class="note"><h1>{title}</h1><p>{text}</p></main>
"""


class Guard:
    """Counts wrong tokens per address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.wrong: dict[str, tuple[int, float]] = {}  # how many, since when

    def seconds(self, address: str) -> float:
        """How long the address stays blocked; 0 if it is not."""
        count, since = self.wrong.get(address, (0, 0.0))
        return max(0.0, since + MINUTE - self.clock()) if count >= WRONG else 0.0

    def note(self, address: str) -> None:
        """Count a wrong token from this address."""
        now = self.clock()
        count, since = self.wrong.get(address, (0, now))
        if now - since >= MINUTE:
            count, since = 0, now
        self.wrong[address] = count + 1, since
        if len(self.wrong) > ADDRESSES:
            del self.wrong[next(iter(self.wrong))]  # the oldest


class Board:
    """The handlers. `application()` is what a server runs; `close()` ends the pages' events."""

    def __init__(self, store: Store, room: Room, title: str, *, secure: bool = False) -> None:
        """secure: browsers reach it by https, so the cookie is sent only that way."""
        self.store, self.room, self.title, self.secure = store, room, title, secure
        self.join, self.instructor = store.setting("join"), store.setting("instructor")
        # the name is unique: several boards on one host differ only in their ports
        name = hashlib.sha256(self.join.encode()).hexdigest()[:8]
        self.cookie = f"board-{name}"
        ends = store.setting("ends")
        self.ends = float(ends) if ends else None
        self.warning = ""
        self.guard = Guard()
        self.writer = ThreadPoolExecutor(1, "store")
        self.closing = False
        room.removed |= set(json.loads(store.setting("removed") or "[]"))
        for taken in store.everything():
            room.take(taken)

    def application(self) -> ASGIApp:
        routes = [
            Route("/join/{token}", self.joined),
            Route("/report", self.report, methods=["POST"]),
            Route("/board/{token}", self.enter),
            Route("/", self.page),
            Route("/page.css", self.file),
            Route("/page.js", self.file),
            Route("/events", self.events),
            Route("/histogram", self.histogram),
            Route("/results.csv", self.results),
            Route("/minutes", self.minutes, methods=["POST"]),
            Route("/helped", self.helped, methods=["POST"]),
            Route("/removed", self.removed, methods=["POST"]),
        ]
        handlers = {HTTPException: self.refuse, Refused: self.malformed, StoreError: self.unkept}
        return _safe(Starlette(routes=routes, exception_handlers=handlers))

    def close(self) -> None:
        self.closing = True
        self.room.changed()

    # --- learners ---------------------------------------------------------------------------------

    async def joined(self, request: Request) -> Response:
        self.check(request, request.path_params["token"], self.join)
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse({"class": self.title})
        text = (
            "This address is for your lab. In a terminal, in the workshop's folder, start "
            "<code>make lab CLASS=…</code> with the address of this page after <code>=</code>."
        )
        return HTMLResponse(NOTE.format(title=html.escape(self.title), text=text, up="../"))

    async def report(self, request: Request) -> Response:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        self.check(request, token if kind.lower() == "bearer" else "", self.join)
        message = reports.message(await body(request, reports.BODY))
        known = [one for one in message["reports"] if self.room.knows(one)]
        unknown = [one["name"] for one in message["reports"] if not self.room.knows(one)]
        taken = await self.keep(self.store.take, {**message, "reports": known}, time.time())
        self.room.take(taken)
        return JSONResponse({"taken": len(taken.reports), "unknown": unknown})

    # --- the instructor ---------------------------------------------------------------------------

    async def enter(self, request: Request) -> Response:
        """Remove the token from the address bar, which may be on a projector."""
        self.check(request, request.path_params["token"], self.instructor)
        answer = RedirectResponse("../", status_code=303)
        answer.set_cookie(  # lax: strict would not be sent from a link in a mail or a wiki
            self.cookie, self.instructor, max_age=30 * 24 * 3600, httponly=True, samesite="lax",
            secure=self.secure,
        )
        return answer

    def check_instructor(self, request: Request) -> None:
        self.check(request, request.cookies.get(self.cookie), self.instructor)

    async def page(self, request: Request) -> Response:
        if self.cookie not in request.cookies:  # no token was tried
            text = "The instructor sees it at the address that <code>make class</code> prints."
            note = NOTE.format(title="The board of a class", text=text, up="")
            return HTMLResponse(note, status_code=401)
        self.check_instructor(request)
        return HTMLResponse((HERE / "page.html").read_text(encoding="utf-8"))

    async def file(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        kind = "text/css" if name.endswith("css") else "text/javascript"
        return Response((HERE / name).read_text(encoding="utf-8"), media_type=kind)

    async def events(self, request: Request) -> Response:
        self.check_instructor(request)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self) -> AsyncIterator[str]:
        watcher = Watcher()
        watcher.learners = set(self.room.learners)
        self.room.watchers.add(watcher)
        try:
            first = {"title": self.title, "course": self.room.course()}
            yield f"retry: 1000\nevent: class\ndata: {json.dumps(first)}\n\n"
            while not self.closing:
                learners, watcher.learners = watcher.learners, set()
                watcher.bell.clear()
                yield f"event: room\ndata: {json.dumps(self.news(learners))}\n\n"
                await asyncio.sleep(BEAT)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(watcher.bell.wait(), SILENCE)
        finally:
            self.room.watchers.discard(watcher)

    def news(self, learners: set[int]) -> dict[str, Any]:
        return {
            "now": time.time(), "ends": self.ends, "warning": self.warning,
            "predictions": {name: count for name, count in self.room.counts.items() if count},
            "learners": [self.room.row(number) for number in sorted(learners)],
        }

    async def histogram(self, request: Request) -> Response:
        self.check_instructor(request)
        name = request.query_params.get("name", "")
        if name not in self.room.predictable:
            raise Refused(f"{name[:100]!r} is not a prediction of the course")
        return JSONResponse(self.room.histogram(name, request.query_params.get("reveal") == "1"))

    async def results(self, request: Request) -> Response:
        self.check_instructor(request)
        file = io.StringIO()
        table = csv.writer(file)
        table.writerow(("learner", "exercise", "verdict", "tries", "symptom"))
        for number in sorted(self.room.learners.keys() - self.room.removed):
            learner = self.room.learners[number]
            for name, said in sorted(learner.checks.items()):
                verdict = "ok" if said["done"] else "wrong"
                row = learner.alias, name, verdict, said["tries"], said["symptom"]
                # a spreadsheet would evaluate what begins like a formula
                table.writerow([f"'{one}" if str(one)[:1] in "=+-@\t" else one for one in row])
        name = {"Content-Disposition": 'attachment; filename="results.csv"'}
        return Response(file.getvalue(), media_type="text/csv", headers=name)

    async def minutes(self, request: Request) -> Response:
        content = await self.asked(request)
        minutes = content.get("minutes")
        if minutes is not None and not (
            type(minutes) in (int, float) and 0 <= minutes <= LONGEST  # NaN is not
        ):
            raise Refused(f"minutes is neither a number from 0 to {LONGEST} nor null")
        ends = None if minutes is None else time.time() + 60 * minutes
        await self.keep(self.store.keep, "ends", ends and repr(ends))
        self.ends = ends
        self.room.changed()
        return JSONResponse({"ends": ends})

    async def helped(self, request: Request) -> Response:
        learner = await self.learner(request)
        await self.keep(self.store.helped, learner)
        self.room.learners[learner].help = None
        self.room.changed(learner)
        return JSONResponse({})

    async def removed(self, request: Request) -> Response:
        learner = await self.learner(request)
        gone = sorted(self.room.removed | {learner})
        await self.keep(self.store.keep, "removed", json.dumps(gone))
        self.room.remove(learner)
        return JSONResponse({})

    async def learner(self, request: Request) -> int:
        learner = (await self.asked(request)).get("learner")
        if type(learner) is not int or learner not in self.room.learners:
            raise Refused("learner is not a learner's number")
        return learner

    async def asked(self, request: Request) -> dict:
        """The content of the page's request; no other site can send its content type."""
        self.check_instructor(request)
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "the content's type is not application/json")
        try:
            content = json.loads(await body(request, SMALL))
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise Refused("the body is not a JSON object")
        return content

    # --- for all of them --------------------------------------------------------------------------

    def check(self, request: Request, token: str | None, right: str) -> None:
        """Raise HTTPException 401, or 429 after too many wrong tokens."""
        if hmac.compare_digest((token or "").encode("utf-8", "replace"), right.encode()):
            return
        address = request.client.host if request.client else ""
        if wait := self.guard.seconds(address):
            raise HTTPException(
                429, "too many wrong tokens from here: wait a minute",
                {"Retry-After": str(int(wait) + 1)},
            )
        self.guard.note(address)
        raise HTTPException(401, "this token is not known here")

    async def keep(self, change: Callable, *words: Any) -> Any:
        """Change the store in its thread, even if the client leaves meanwhile."""
        try:
            done = await asyncio.get_running_loop().run_in_executor(self.writer, change, *words)
        except StoreError as error:
            self.warn(f"{error}. Reports wait in the labs and arrive when there is room.")
            raise
        self.warn("")
        return done

    def warn(self, text: str) -> None:
        if text != self.warning:
            self.warning = text
            self.room.changed()

    async def refuse(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        content = {"error": error.detail}
        return JSONResponse(content, status_code=error.status_code, headers=error.headers)

    async def malformed(self, request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, status_code=400)

    async def unkept(self, request: Request, error: Exception) -> Response:
        status = 507 if isinstance(error, Full) else 503
        text = "the board's disk is full" if status == 507 else "the board cannot write its file"
        return JSONResponse({"error": f"{text}: send it again later"}, status_code=status)


async def body(request: Request, most: int) -> bytes:
    """A request's body of at most `most` bytes; HTTPException 413, or 408 for a slow one."""
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                found += piece
                if len(found) > most:
                    raise HTTPException(413, f"more than {most:,} bytes", {"Connection": "close"})
    except TimeoutError:
        raise HTTPException(408, "the request was too slow", {"Connection": "close"}) from None
    except ClientDisconnect:
        raise HTTPException(400, "the client has left") from None
    return bytes(found)


def _safe(app: ASGIApp) -> ASGIApp:
    """Add the headers that keep browsers from contacting other hosts and from storing pages."""
    headers = [(name.lower().encode(), value.encode()) for name, value in SAFE.items()]

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *headers]
            await send(message)

        await app(scope, receive, sending if scope["type"] == "http" else send)

    return wrapped
