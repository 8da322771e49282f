"""`posttrain view`: a local page about the runs in a folder, live while they train.

The server listens on the loopback address, answers only requests with the token, and reads run directories. It imports no
code that a run names, loads no model, and writes nothing.
"""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import wraps
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from posttrain.errors import InputError, PosttrainError
from posttrain.loopback import App, Guard, Receive, Refusal, Scope, Send, header
from posttrain.recipe.components import looking
from posttrain.runs.directory import RunDirectory
from posttrain.runs.sources import Source, bundles_of, differing_keys, open_sources
from posttrain.view import run_pages
from posttrain.view.browse import ENDINGS, ORDERS, PAGE, SPLITS, Filter, Store, group_page, steps_of
from posttrain.view.listing import COLUMNS, SORTS, STATES, Query, Scanner, listed
from posttrain.view.templates import templates

POLICY = (
    "default-src 'none'; script-src 'self'; style-src-elem 'self'; style-src-attr 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing is loaded from another machine, and markup in the text of a model could not run."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_POLL_SECONDS = 0.7
"""Seconds between checks of the files that a page shows."""
_TYPES = {".js": "text/javascript", ".css": "text/css"}


class PageGuard(Guard):
    """Passes on only requests of this server's own pages and of addresses with the token.

    The first request has the token in its address; the answer moves it to a cookie.
    """

    def __init__(self, app: App, port: int, token: str) -> None:
        def check_token(scope: Scope) -> Refusal | None:
            try:
                kept = SimpleCookie(b"; ".join(header(scope, b"cookie")).decode("latin-1")).get(self._cookie)
            except CookieError:
                kept = None
            given = _token_of(scope) or (kept.value if kept is not None else "")
            if not hmac.compare_digest(given.encode(), token.encode()):
                return 403, "open the address that `posttrain view` printed; it holds the token"
            return None

        super().__init__(app, port, check_token)
        self.origins = tuple(b"http://" + host for host in self.hosts)
        self._token, self._cookie = token, f"posttrain-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.refusal(scope) is None and _token_of(scope):
            pairs = parse_qsl(scope["query_string"].decode("latin-1"))
            query = urlencode([pair for pair in pairs if pair[0] != "token"])
            target = f"{scope['raw_path'].decode('latin-1')}{'?' if query else ''}{query}"
            response = RedirectResponse(target, 303, HEADERS)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            await response(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _token_of(scope: Scope) -> str:
    """The token in the address of a request; empty without one."""
    given = parse_qsl(scope["query_string"].decode("latin-1"))
    return next((value for key, value in given if key == "token"), "")


class Pages:
    """The pages about the runs in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.scanner = Scanner(self.folder)
        self.logs = run_pages.Logs()
        self.store = Store()

    def app(self) -> App:
        """The application, without the guard. Every answer has `HEADERS`."""
        pages = {
            "/": self.runs,
            "/list": self.runs_list,
            "/run/{name:path}": self.run,
            "/state/{name:path}": self.state,
            "/charts/{name:path}": self.charts,
            "/episodes/{name:path}": self.episodes,
            "/group/{name:path}": self.group,
            "/pipeline/{name:path}": self.pipeline,
            "/compare": self.compare,
            "/compare-charts": self.compare_charts,
            "/compare-results": self.compare_results,
            "/static/{file}": self.static,
        }
        routes = [Route(path, self._page(answer)) for path, answer in pages.items()]
        events = [Route(path, self.events) for path in ("/events", "/events/{name:path}")]
        starlette = Starlette(routes=[*routes, *events])

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def with_headers(message: Any) -> None:
                if message["type"] == "http.response.start":
                    given = {key for key, _ in message["headers"]}
                    added = [
                        (key.encode(), value.encode()) for key, value in HEADERS.items() if key.encode() not in given
                    ]
                    message = {**message, "headers": [*message["headers"], *added]}
                await send(message)

            await starlette(scope, receive, with_headers)

        return app

    def _page(self, answer: Callable[[Request], Response]) -> Callable[[Request], Any]:
        """The endpoint of a page: in a thread, without importing what a run names; an error is its sentence."""

        @wraps(answer)
        def endpoint(request: Request) -> Response:
            with looking():
                try:
                    response = answer(request)
                except PosttrainError as error:
                    status = 404 if isinstance(error, InputError) else 500
                    part = "hx-request" in request.headers  # htmx swaps in no answers with another status
                    template = "problem.html.j2" if part else "error.html.j2"
                    response = self.render(template, 200 if part else status, message=self._below(str(error)))
            return response

        return endpoint

    def render(self, template: str, status: int = 200, **values: Any) -> Response:
        """A page or a part of one."""
        text = templates().get_template(template).render(folder=self.folder, sorts=SORTS, states=STATES, **values)
        return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)

    def _below(self, text: str) -> str:
        """`text` in which runs are named as in the list, by their paths below the folder."""
        return text.replace(f"{self.folder}/", "")

    def runs(self, request: Request) -> Response:
        """The list of runs as far as they have been read; `/list` returns the rest."""
        return self.whole_list(Query.of(request.query_params))

    def whole_list(self, query: Query) -> Response:
        """The page of the list, without waiting for all runs to be read, so that it is painted at once."""
        # The rest is asked for after 300 ms, so that reading runs does not compete with the first paint.
        listing = listed(self.scanner, query, read=0.05)
        return self.render("runs.html.j2", query=query, listing=listing, wait=300, columns=COLUMNS)

    def runs_list(self, request: Request) -> Response:
        """The list without the page around it."""
        query = Query.of(request.query_params)
        response = self.render("list.html.j2", query=query, listing=listed(self.scanner, query, read=0.5), wait=10)
        if request.headers.get("hx-trigger") == "filter":
            response.headers["hx-replace-url"] = f"/?{query.address()}"
        return response

    def run(self, request: Request) -> Response:
        """The page of a run."""
        name = request.path_params["name"]
        path = self.scanner.path(name)
        about = run_pages.facts(self.logs, path)
        return self.render("run.html.j2", run=self.scanner.summary(name, path), about=about)

    def state(self, request: Request) -> Response:
        """The status section of a run's page."""
        name = request.path_params["name"]
        return self.render("state.html.j2", run=self.scanner.summary(name, self.scanner.path(name)))

    def charts(self, request: Request) -> Response:
        """The charts of a run as JSON."""
        return _json(run_pages.charts(self.logs, self.scanner.path(request.path_params["name"])))

    def episodes(self, request: Request) -> Response:
        """A page of the episodes of a run."""
        name = request.path_params["name"]
        run, wanted = RunDirectory(self.scanner.path(name)), Filter.of(request.query_params)
        steps, split = steps_of(run.episodes, wanted.split)
        return self.render(
            "episodes.html.j2",
            name=name,
            found=self.store.find(steps, wanted),
            run=self.scanner.summary(name, run.path),
            steps=steps,
            split=split,
            step=steps[-1].step if wanted.step is None else wanted.step,
            wanted=wanted,
            splits=SPLITS,
            endings=ENDINGS,
            orders=ORDERS,
            page_size=PAGE,
        )

    def group(self, request: Request) -> Response:
        """The episodes of a group side by side."""
        name = request.path_params["name"]
        run = RunDirectory(self.scanner.path(name))
        shown = self.scanner.summary(name, run.path)
        return self.render("group.html.j2", name=name, run=shown, **group_page(run, request.query_params, self.store))

    def pipeline(self, request: Request) -> Response:
        """The page of a pipeline: its stages in order, with their results on one axis."""
        name = request.path_params["name"]
        return self.render("pipeline.html.j2", name=name, stages=run_pages.stages_of(self.scanner, name))

    def compare(self, request: Request) -> Response:
        """The page that compares runs."""
        names, sources = self._sources(request)
        return self.render(
            "compare.html.j2",
            names=names,
            query=urlencode([("run", name) for name in names]),
            differing=differing_keys(sources),
            runs=[self.scanner.summary(name, self.scanner.path(name)) for name in names],
            grouped=len(bundles_of(sources)[0]) < len(sources),
            apart=_apart(request),
        )

    def compare_charts(self, request: Request) -> Response:
        """The curves of several runs as JSON."""
        charts = run_pages.charts_of_runs(self._sources(request)[1], _apart(request))
        return _json({"charts": charts, "marks": [], "axes": {}})

    def compare_results(self, request: Request) -> Response:
        """The paired differences of several runs."""
        names, sources = self._sources(request)
        query = urlencode([("run", name) for name in names])
        found = run_pages.paired(sources, _apart(request))
        notes = [self._below(note) for note in found.pop("notes", ())]
        return self.render("results.html.j2", query=query, notes=notes, **found)

    def _sources(self, request: Request) -> tuple[list[str], list[Source]]:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not names:
            raise InputError("no runs are selected; select some in the list of runs")
        read = zip(names, open_sources([self.scanner.path(name) for name in names]), strict=True)
        return names, [replace(source, name=name) for name, source in read]

    async def events(self, request: Request) -> Response:
        """Server-sent events: one each time the files of the run change, or those of any run without a name."""
        name = request.path_params.get("name")
        return StreamingResponse(self._changes(name), media_type="text/event-stream")

    async def _changes(self, name: str | None) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n"
        before = await run_in_threadpool(self._stamp, name)
        silent = cost = 0.0
        while True:
            pause = max(_POLL_SECONDS, 20 * cost)  # a folder of many runs must not keep a core busy
            await asyncio.sleep(pause)
            started = time.monotonic()
            now = await run_in_threadpool(self._stamp, name)
            cost = time.monotonic() - started
            silent += pause
            if now != before:
                before, silent = now, 0.0
                yield b"event: change\ndata: {}\n\n"
            elif silent > 10:
                silent = 0.0
                yield b": waiting\n\n"  # a write finds a closed connection

    def _stamp(self, name: str | None) -> object:
        try:
            paths = self.scanner.find() if name is None else {name: self.scanner.path(name)}
        except PosttrainError:
            return None
        return [(one, self.scanner.stamp(path)) for one, path in paths.items()]

    def static(self, request: Request) -> Response:
        """A file of this package."""
        file = files("posttrain.view") / "static" / request.path_params["file"]
        kind = _TYPES.get(Path(request.path_params["file"]).suffix)
        if kind is None or not file.is_file():
            raise InputError("there is no such file; go back to the list of runs")
        return Response(file.read_bytes(), media_type=kind, headers={"cache-control": "private, max-age=3600"})


def _json(values: dict[str, Any]) -> Response:
    """`values` in ASCII, because text of a run may not be encodable."""
    return Response(json.dumps(values, allow_nan=False), media_type="application/json")


def _apart(request: Request) -> bool:
    """Whether runs that differ only in their seed are compared with each other."""
    return request.query_params.get("seeds") == "apart"


def guarded(folder: Path, port: int, token: str) -> PageGuard:
    """The application with its guard. It has shown the list once, so that the first page need not wait for templates."""
    pages = Pages(folder)
    pages.whole_list(Query())
    return PageGuard(pages.app(), port, token)
