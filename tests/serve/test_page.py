"""The page at ``/``: what its files may not hold, and what it does in a real Chromium.

The second half needs Playwright (``pip install "tilefold[page]"``) and a Chromium (``apt install
chromium``); ``make test-page`` runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.serve.page_service import PageParts, make_page_parts
from tests.serve.running import Client, serving
from tilefold import retrieval as r
from tilefold.retrieval.data.collection import Collection, Document
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service

EVIL = "<img src=x onerror=alert(1)> & \U0001f4be csv files \u05d0\u05d1"
EVIL_DOCUMENTS = [
    Document("evil", "<script>alert(2)</script>", EVIL * 30),
    Document(
        "<svg/onload=alert(3)>",
        "<a href=javascript:alert(4)>a</a>",
        "csv files <style>*{display:none}</style>",
    ),
    Document(
        "javascript:eval(5)",
        '"><iframe srcdoc="<script>alert(6)</script>">',
        "<body onload=alert(7)> csv files",
    ),
]
LACKING = ["vectors", "data", "vectors and data", "title", "text", "a model", "a model and data"]


@pytest.fixture(scope="module")
def searchable(
    sparse: Any,
    late: Any,
    collection: Collection,
    tmp_path_factory: pytest.TempPathFactory,
) -> Searchable:
    folder = tmp_path_factory.mktemp("page")
    documents = dict(collection.documents) | {document.id: document for document in EVIL_DOCUMENTS}
    texts = {name: document.contents for name, document in documents.items()}
    r.encode_collection(sparse, texts, folder / "vectors", special_tokens=False)
    vectors = r.read_vectors(folder / "vectors")
    index = r.build_index(vectors, "exact")
    models = Served(sparse, "sparse", "tiny"), Served(late, "multi-vector", "colbert")
    return Searchable(
        "small",
        index,
        models[0],
        documents,
        vectors,
        r.BM25Index.build(texts),
        models[1],
    )


@pytest.fixture(scope="module")
def client(searchable: Searchable) -> Iterator[Client]:
    models = [model for model in (searchable.encoder, searchable.late) if model]
    with serving(Service(models, searchable=searchable)) as running:
        yield running


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_loads_its_own_files_alone_under_a_strict_policy(client: Client) -> None:
    reply = client.get("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";")
    )
    assert (policy["default-src"], policy["script-src"], policy["style-src"]) == (
        "'none'",
        "'self'",
        "'self'",
    )
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    tags = Tags()
    tags.feed(reply.raw.decode())
    for tag, attributes in tags.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        loaded = attributes.get("src") or (attributes.get("href") if tag == "link" else None)
        if loaded and not loaded.startswith("data:"):
            part = client.get(f"/{loaded}")
            assert (part.status, part.headers["x-content-type-options"]) == (200, "nosniff")
    labelled = {attributes.get("for") for tag, attributes in tags.found if tag == "label"}
    fields = [
        attributes
        for tag, attributes in tags.found
        if tag == "input" and attributes["type"] != "checkbox"
    ]
    assert all(attributes["id"] in labelled for attributes in fields)
    script = client.get("/page.js").raw.decode()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|https?://",
        script,
    )
    assert "http" not in client.get("/page.css").raw.decode()


def visit(page: Any, client: Client, query: str = "") -> None:
    page.goto(f"http://127.0.0.1:{client.port}/{query}")
    page.wait_for_selector("#results article" if query else "#options:not([hidden])")


def test_a_search_shows_results_with_marks_bars_and_times(page: Any, client: Client) -> None:
    visit(page, client)
    assert page.evaluate("document.activeElement.id") == "query"
    page.keyboard.type("read csv files")
    page.keyboard.press("Enter")
    page.wait_for_selector("#results article")
    answer = client.post("/v1/small/search", {"query": "read csv files", "explain": True}).json
    assert page.locator("#results article").count() == 10
    assert re.match(
        r"10 results · encoding [\d.]+ ms · search [\d.]+ ms · \d+ ms in all",
        page.inner_text("#status"),
    )
    heaviest = answer["query"]["terms"][0]
    first = page.locator("#bars li").first
    assert first.locator(".name").inner_text() == heaviest["term"]
    assert first.locator(".number").inner_text() == f"{heaviest['weight']:.3f}"
    assert (first.get_attribute("class") == "expanded") == heaviest["expanded"]
    widths = [bar.bounding_box()["width"] for bar in page.locator("#bars .bar").all()[:8]]
    assert widths == sorted(widths, reverse=True)
    asked = [answer["query"]["text"][start:stop] for start, stop, _ in answer["query"]["marks"]]
    assert page.locator("#query-text mark").all_inner_texts() == asked
    top = answer["candidates"][0]
    places = top["explanation"]["marks"]["text"]
    characters = list(top["doc"]["text"])
    shown = page.locator("#results article").first.locator(".text mark").all_inner_texts()
    assert shown == ["".join(characters[start:stop]) for start, stop, _ in places if stop <= 420]
    mark = page.locator("#results mark").first
    assert re.search(r": [\d.]+, \d+% of the score", mark.get_attribute("title"))
    mark.hover()
    assert "same" in mark.get_attribute("class")
    page.click("#more-terms")
    assert page.locator("#bars li").count() == len(answer["query"]["terms"])
    assert page.said == []


def test_what_documents_and_queries_hold_is_text_and_never_html(page: Any, client: Client) -> None:
    page.goto(f"http://127.0.0.1:{client.port}/")
    page.fill("#query", EVIL)
    page.select_option("#hits", "20")
    page.keyboard.press("Enter")
    page.click("#go")
    page.wait_for_selector("#results article")
    assert page.inner_text("#query-text") == EVIL
    evil = page.locator("article", has_text="alert(2)")
    assert "<script>alert(2)</script>" in evil.locator("h3").inner_text()
    assert evil.locator(".text").inner_text().startswith(EVIL + "<img")
    evil.locator("button").click()
    assert evil.locator(".text").inner_text() == EVIL * 30
    assert page.locator("main img, main script").count() == 0
    assert page.said == []


def test_options_show_the_stages_and_the_address_brings_a_search_back(
    page: Any,
    client: Client,
) -> None:
    visit(page, client, "?q=dates")
    for name in ("fusion", "prf", "rerank"):
        page.check(f"#{name}")
    page.wait_for_selector(".stages >> text=late interaction")
    stages = page.locator("article").first.locator("th").all_inner_texts()
    assert stages == ["learned sparse", "BM25", "fused", "late interaction"]
    assert "late interaction" in page.inner_text("#status")
    assert page.locator("#legend-feedback").is_visible()
    assert page.url.endswith("/?q=dates")


def test_rankings_stand_side_by_side_and_lead_to_the_results(page: Any, client: Client) -> None:
    visit(page, client, "?q=read+csv+files")
    assert page.locator("#beside").is_hidden()
    page.check("#columns")
    page.wait_for_selector("#rankings section")
    answer = client.post("/v1/small/search", {"query": "read csv files", "columns": True}).json
    assert page.locator("#rankings h3").all_inner_texts() == [
        "learned sparse",
        "BM25",
        "late interaction",
    ]
    for section, name in zip(
        page.locator("#rankings section").all(),
        ("sparse", "words", "late"),
        strict=True,
    ):
        expected = [f"{entry['rank']}. {entry['title']}" for entry in answer["columns"][name]]
        assert section.locator("li .name").all_inner_texts() == expected
    boxes = [section.bounding_box() for section in page.locator("#rankings section").all()]
    assert len({box["y"] for box in boxes}) == 1 and len({box["x"] for box in boxes}) == 3
    top = page.locator("#rankings section").first.locator("li").nth(1)
    top.hover()
    same = page.locator("article.same")
    assert (same.count(), same.get_attribute("data-document")) == (
        1,
        top.get_attribute("data-document"),
    )
    top.locator("a").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id || location.hash").endswith("result-2")
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert (
        len({section.bounding_box()["x"] for section in page.locator("#rankings section").all()})
        == 1
    )
    page.uncheck("#columns")
    page.wait_for_selector("#beside", state="hidden")
    assert page.said == []


def test_the_keyboard_alone_reaches_everything(page: Any, client: Client) -> None:
    visit(page, client, "?q=dates")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "go"
    recorded = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        recorded.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"fusion", "prf", "rerank", "columns", "hits", "more-terms"} <= recorded
    assert any(each.startswith("result-") for each in recorded)
    focused = "Array.from(document.querySelectorAll('article')).indexOf(document.activeElement)"
    before = page.evaluate(focused)
    page.keyboard.press("j")
    assert page.evaluate(focused) == before + 1
    page.keyboard.press("k")
    assert page.evaluate(focused) == before
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "query"


def test_a_phone_and_dark_mode_fit(page: Any, client: Client) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    page.emulate_media(color_scheme="dark")
    visit(page, client, "?q=read+csv+files")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    back, ink = (
        page.evaluate(f"getComputedStyle(document.body).{name}")
        for name in ("backgroundColor", "color")
    )
    darkness, light = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (back, ink))
    assert (darkness < 150, light > 600) == (True, True)
    for name in ("#go", "#hits"):
        assert page.locator(name).bounding_box()["height"] >= 20


def test_without_an_index_the_page_shows_the_vector(page: Any, searchable: Any) -> None:
    with serving(Service([searchable.encoder])) as client:
        page.goto(f"http://127.0.0.1:{client.port}/?q=read+csv")
        page.wait_for_selector("#bars li")
        row = client.post(
            "/query/embed_sparse",
            {"inputs": "read csv", "top_k": 1, "tokens": True},
        ).json[0][0]
        assert page.locator("#bars .number").first.inner_text() == f"{row['value']:.3f}"
        assert "without an index" in page.inner_text("#about")


def test_a_key_is_asked_for_and_errors_are_said(page: Any, searchable: Any) -> None:
    with serving(
        Service([searchable.encoder], searchable=replace(searchable, late=None)),
        api_key="sesam",
    ) as client:
        page.goto(f"http://127.0.0.1:{client.port}/?q=dates")
        page.wait_for_selector("#key-row:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("sesam")
        page.keyboard.press("Enter")
        page.wait_for_selector("#results article")
        assert page.locator("#key-row").is_hidden()
    page.fill("#query", "again")
    page.click("#go")
    page.wait_for_selector("#status >> text=does not answer")


def without(searchable: Searchable, lacking: str) -> Searchable:
    """What a server has whose options lack this."""
    if lacking.startswith("a model"):
        kept = {} if lacking.endswith("data") else searchable.documents
        return Searchable(
            "small",
            searchable.words or pytest.fail("the fixture has BM25"),
            documents=kept,
        )
    documents = {} if "data" in lacking else dict(searchable.documents)
    if lacking in ("title", "text"):
        documents = {name: replace(each, **{lacking: ""}) for name, each in documents.items()}
    vectors = None if "vectors" in lacking else searchable.vectors
    return replace(searchable, words=None, late=None, vectors=vectors, documents=documents)


@pytest.mark.parametrize("lacking", LACKING)
def test_results_are_shown_whatever_the_server_lacks(
    page: Any,
    searchable: Searchable,
    lacking: str,
) -> None:
    served = without(searchable, lacking)
    models = [served.encoder] if served.encoder else []
    with serving(Service(models, searchable=served)) as client:
        answer = client.post("/v1/small/search", {"query": "csv files", "hits": 20}).json
        visit(page, client)
        page.select_option("#hits", "20")
        page.fill("#query", "csv files")
        page.keyboard.press("Enter")
        page.wait_for_selector("#status >> text=ms in all")
    actual = answer["candidates"]
    documents = [each["doc"] or {"title": "", "text": ""} for each in actual]
    assert page.inner_text("#status").startswith(f"{len(actual)} results")
    assert {each.id for each in EVIL_DOCUMENTS} <= {each["docid"] for each in actual}
    titles = [
        f"{at}. {document['title'] or each['docid']}"
        for at, (each, document) in enumerate(zip(actual, documents, strict=True), 1)
    ]
    assert page.locator("article h3").all_text_contents() == titles
    texts = [document["text"] for document in documents if document["text"]]
    shown = page.locator("article .text").all_text_contents()
    assert len(shown) == len(texts) and all(
        text.startswith(part.removesuffix(" …")) for part, text in zip(shown, texts, strict=True)
    )
    assert (
        page.locator("main :is(img, script, svg, style, iframe, body, a[href*=javascript])").count()
        == 0
    )
    assert page.said == []


def test_what_failed_is_said_and_by_whom(page: Any, client: Client) -> None:
    answers: dict[str, dict[str, Any]] = {
        "the index is away": {
            "status": 503,
            "json": {"error": "the index is away", "error_type": "Unhealthy"},
        },
        "The service answered 502, and not in JSON.": {
            "status": 502,
            "body": "<h1>Bad gateway</h1>",
        },
        "The service answered 200, and not in JSON.": {"status": 200, "body": "<h1>Log in</h1>"},
        "The service answered 500.": {"status": 500, "body": "null"},
        "This page failed, not the service: ": {
            "status": 200,
            "json": {"query": {}, "candidates": [{}]},
        },
    }
    visit(page, client)
    page.fill("#query", "csv files")
    for message, answer in answers.items():
        page.route("**/v1/small/search", lambda route, _, answer=answer: route.fulfill(**answer))
        page.click("#go")
        page.wait_for_selector(f"#status >> text={message}")
        assert page.locator("#results article").count() == 0
    page.unroute("**/v1/small/search")
    page.route("**/v1/small/search", lambda route: route.abort())
    page.click("#go")
    page.wait_for_selector("#status >> text=The service does not answer.")
    page.unroute("**/v1/small/search")
    page.click("#go")
    page.wait_for_selector("#results article")
    assert any(
        "TypeError" in said for said in page.said
    )  # the console says where the page itself failed


@pytest.fixture(scope="module")
def page_parts(tmp_path_factory: pytest.TempPathFactory) -> PageParts:
    return make_page_parts(tmp_path_factory.mktemp("page-images"))


def image_color(page: Any, selector: str) -> list[int]:
    """Return the mean color of an image that the browser has decoded."""
    return page.evaluate(
        """async (selector) => {
            const image = document.querySelector(selector);
            await image.decode();
            const canvas = document.createElement("canvas");
            canvas.width = canvas.height = 1;
            const context = canvas.getContext("2d");
            context.drawImage(image, 0, 0, 1, 1);
            return Array.from(context.getImageData(0, 0, 1, 1).data);
        }""",
        selector,
    )


@pytest.mark.parametrize("api_key", [None, "sesam"], ids=["open", "with a key"])
def test_page_images_have_thumbnails_and_open_with_their_heat_maps(
    page: Any,
    page_parts: PageParts,
    api_key: str | None,
) -> None:
    with serving(page_parts.service(), api_key=api_key) as client:
        page.goto(f"http://127.0.0.1:{client.port}/?q=some+words")
        if api_key is not None:
            page.fill("#key", api_key)
            page.click("#go")
        page.wait_for_selector("#results article .thumbnail img[src^='blob:']")
        assert page.locator("#results article .thumbnail").count() == 7
        thumbnail = image_color(page, ".thumbnail img")
        page.locator(".thumbnail").first.click()
        page.wait_for_selector("#viewer[open] #viewer-image[src^='blob:']")
        title = page.locator("#results article h3").first.inner_text()
        assert page.inner_text("#viewer-title") == title.removeprefix("1. ")
        labels = page.locator("#viewer-tokens button").all_inner_texts()
        assert labels[:2] == ["Heat map", "Page"]
        assert "".join(label.removeprefix("##") for label in labels[2:]) == "somewords"
        colors = {}
        for label in ("Page", labels[2]):
            address = page.get_attribute("#viewer-image", "src")
            page.locator("#viewer-tokens button", has_text=label).first.click()
            page.wait_for_function(
                "(address) => document.querySelector('#viewer-image').src !== address",
                arg=address,
            )
            colors[label] = image_color(page, "#viewer-image")
        assert colors["Page"] == pytest.approx(thumbnail, abs=12)
        difference = sum(abs(a - b) for a, b in zip(colors["Page"], colors[labels[2]], strict=True))
        assert difference > 60, "the heat map colors the page"
        page.click("#viewer-close")
        assert page.locator("#viewer").is_hidden()
        expected = ["401"] if api_key else []
        assert [
            message for message in page.said if not any(code in message for code in expected)
        ] == []


def test_hits_of_late_interaction_list_the_tokens_that_match(
    page: Any,
    late: Any,
    collection: Collection,
    tmp_path: Path,
) -> None:
    texts = collection.contents()
    index = r.LateIndex.build(r.encode_texts(late, texts, kind="document"), tmp_path / "index")
    served = Served(late, "multi-vector", "colbert")
    searchable = Searchable("texts", index, served, collection.documents)
    with serving(Service([served], searchable=searchable)) as client:
        visit(page, client, "?q=csv+files")
        body = {"query": "csv files", "hits": 10, "explain": True}
        (best, *_) = client.post("/v1/texts/search", body).json["candidates"]
        shown = page.locator("#results article").first.locator(".terms li").all_inner_texts()
        expected = [
            f"{match['query_token']} → {match['document_token']} {match['similarity']:.2f}"
            for match in best["explanation"]["matches"]
            if match["content"]
        ]
        assert shown == expected
        assert page.said == []
