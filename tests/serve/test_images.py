"""Images in requests, page images in searches, and what a server refuses of both."""

from __future__ import annotations

import base64
import io
import shutil
import struct
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from PIL import Image
from sentence_transformers import MultiVectorEncoder

from tests.serve.page_service import PageParts, make_page_parts
from tests.serve.running import Client, Reply, serving
from tests.serve.test_documents import writing_server
from tilefold import retrieval as r
from tilefold.retrieval.data.collection import Document
from tilefold.retrieval.data.pages import Page
from tilefold.retrieval.index.segments import Segments
from tilefold.serve import searching
from tilefold.serve.bodies import ImageData
from tilefold.serve.forms import parse_form
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service
from tilefold.testing.page_models import save_page_model
from tilefold.testing.synthetic_pages import random_words

QUERY = "some words"
MAX_PIXELS = 200_000


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> PageParts:
    return make_page_parts(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def client(parts: PageParts) -> Iterator[Client]:
    with serving(parts.service(max_image_pixels=MAX_PIXELS)) as running:
        yield running


@pytest.fixture(scope="module")
def text_client(late: Any) -> Iterator[Client]:
    with serving(Service([Served(late, "multi-vector", "colbert")])) as running:
        yield running


def encoded(image: Any, file_format: str = "PNG") -> str:
    """Return the base64 of an image in a file format."""
    stream = io.BytesIO()
    image.save(stream, file_format)
    return base64.b64encode(stream.getvalue()).decode()


def encoded_header(width: int, height: int) -> str:
    """Return the base64 of a PNG that declares a size, and has no pixels."""
    content = bytearray(base64.b64decode(encoded(Image.new("1", (1, 1)))))
    header = slice(12, 29)  # the type of the chunk, and its 13 bytes
    struct.pack_into(">II", content, 16, width, height)
    struct.pack_into(">I", content, header.stop, zlib.crc32(content[header]))
    return base64.b64encode(content).decode()


def page(color: str = "white", size: tuple[int, int] = (60, 80)) -> Any:
    """A page with a dark rectangle."""
    image = Image.new("RGB", size, color)
    image.paste("black", (10, 10, 30, 20))
    return image


def assert_close_vectors(actual: Any, expected: Any) -> None:
    """Check vectors of length 1 that a batch may have rounded differently."""
    np.testing.assert_allclose(np.array(actual), expected.float().numpy(), atol=1e-5)


def image_path(document_id: str) -> str:
    return f"/v1/pages/image/{quote(document_id, safe='')}"


def opened(reply: Any) -> Any:
    """Open the image of a reply."""
    assert (reply.status, reply.headers["content-type"]) == (200, "image/jpeg")
    return Image.open(io.BytesIO(reply.raw))


def test_token_vectors_of_images_and_texts_are_those_of_the_model(
    client: Client,
    parts: PageParts,
) -> None:
    inputs = [{"image": encoded(page())}, "lost card", {"image": encoded(page("lightblue"))}]
    reply = client.post("/query/embed_all", {"inputs": inputs})
    assert reply.status == 200
    first, text, second = reply.json
    model = parts.model
    images = model.encode_query([page(), page("lightblue")], show_progress_bar=False)
    assert_close_vectors(first, images[0])
    assert_close_vectors(second, images[1])
    assert_close_vectors(text, model.encode_query(["lost card"])[0])
    assert int(reply.headers["x-compute-tokens"]) > len(first)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_formats_and_data_urls_are_read(client: Client, file_format: str) -> None:
    text = encoded(page(), file_format)
    for image in (text, f"data:image/{file_format.lower()};base64,{text}"):
        reply = client.post("/embed_all", {"inputs": {"image": image}})
        assert (reply.status, len(reply.json)) == (200, 1)


def test_images_are_ranked_for_a_query(client: Client, parts: PageParts) -> None:
    pages = [page("white"), page("navy"), page("maroon")]
    documents = [{"image": encoded(image)} for image in pages]
    reply = client.post("/v2/rerank", {"query": QUERY, "documents": documents, "raw_scores": True})
    model = parts.model
    expected = model.similarity(
        model.encode_query([QUERY]),
        model.encode_document(pages, show_progress_bar=False),
    )[0].tolist()
    scores = {entry["index"]: entry["relevance_score"] for entry in reply.json["results"]}
    assert [scores[position] for position in range(3)] == pytest.approx(expected, abs=1e-3)
    assert all("document" not in entry for entry in reply.json["results"])


@pytest.mark.parametrize(
    ("image", "status", "message"),
    [
        pytest.param(encoded(page(), "GIF"), 415, "PNG, JPEG, WebP or TIFF", id="a GIF"),
        pytest.param(
            base64.b64encode(b"%PDF-1.4 ...").decode(), 415, "PNG, JPEG, WebP or TIFF", id="a PDF"
        ),
        pytest.param(
            encoded(Image.new("1", (1000, 201))), 413, "more than the limit of 200000", id="pixels"
        ),
        pytest.param(
            encoded_header(15_000, 15_000),
            413,
            "more pixels than the limit of 200000",
            id="more pixels than Pillow reads",
        ),
        pytest.param(encoded(page())[:120], 422, "an image is damaged", id="half of a PNG"),
        pytest.param("https://example.org/a.png", 422, "URLs are not fetched", id="a URL"),
        pytest.param("", 422, "got an empty text", id="an empty text"),
    ],
)
def test_images_that_cannot_be_encoded_are_refused(
    client: Client,
    image: str,
    status: int,
    message: str,
) -> None:
    reply = client.post("/embed_all", {"inputs": [{"image": image}]})
    assert (reply.status, message in reply.json["error"]) == (status, True), reply.json


@pytest.fixture(scope="module")
def qwen_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server with the architecture of ColQwen2, whose processor refuses narrow images."""
    folder = save_page_model(tmp_path_factory.mktemp("qwen"), "colqwen2", words=random_words(60))
    model: Any = MultiVectorEncoder(str(folder), device="cpu")
    with serving(Service([Served(model, "multi-vector", "qwen")])) as running:
        yield running


def test_an_image_of_a_shape_that_the_model_refuses_is_an_error_of_the_request(
    qwen_client: Client,
) -> None:
    narrow = {"image": encoded(Image.new("RGB", (1, 1000)))}
    reply = qwen_client.post("/embed_all", {"inputs": [narrow]})
    assert (reply.status, reply.json["error_type"]) == (422, "Validation")
    assert "the model takes no image of 1 x 1000 pixels: " in reply.json["error"]
    assert qwen_client.post("/embed_all", {"inputs": [{"image": encoded(page())}]}).status == 200


def png(image: Any) -> bytes:
    return base64.b64decode(encoded(image))


def post_form(
    client: Client,
    path: str,
    files: list[tuple[str, Any]],
    fields: dict[str, Any] | None = None,
) -> Reply:
    """Send a form as httpx encodes it."""
    form = httpx.Request("POST", "http://localhost", files=files, data=fields)
    return client.request("POST", path, form.read(), content_type=form.headers["content-type"])


def test_a_form_has_the_vectors_of_base64(client: Client) -> None:
    images = [page(), page("lightblue")]
    files = [("inputs", ("page.png", png(image), "image/png")) for image in images]

    reply = post_form(client, "/document/embed_all", files, {"truncate": "true"})

    body = {"inputs": [{"image": encoded(image)} for image in images]}
    assert reply.status == 200
    assert reply.json == client.post("/document/embed_all", body).json


@pytest.mark.parametrize(
    ("origins", "headers", "status"),
    [
        pytest.param((), {"origin": "https://other.example"}, 403, id="another site"),
        pytest.param((), {"origin": "null"}, 403, id="a page without an origin"),
        pytest.param(
            (),
            {"origin": "https://other.example", "sec_fetch_site": "cross-site"},
            403,
            id="another site in a new browser",
        ),
        pytest.param((), {}, 200, id="no browser"),
        pytest.param((), {"origin": "http://localhost:80", "host": "localhost:80"}, 200, id="same"),
        pytest.param(
            (),
            {"origin": "https://search.example", "sec_fetch_site": "same-origin"},
            200,
            id="the same site behind a proxy",
        ),
        pytest.param(
            ["https://other.example"],
            {"origin": "https://other.example"},
            200,
            id="an allowed site",
        ),
        pytest.param(["*"], {"origin": "https://other.example"}, 200, id="all sites"),
    ],
)
def test_forms_of_other_sites_need_permission(
    parts: PageParts,
    origins: Sequence[str],
    headers: dict[str, str],
    status: int,
) -> None:
    """Browsers send forms of any page without asking the server first."""
    with serving(parts.service(), origins=origins) as client:
        body = b'--b\r\nContent-Disposition: form-data; name="inputs"\r\n\r\ntext\r\n--b--'
        content_type = "multipart/form-data; boundary=b"
        reply = client.request("POST", "/embed_all", body, content_type=content_type, **headers)
    assert reply.status == status, reply.raw


def test_a_form_ranks_files_and_texts_for_a_query(client: Client) -> None:
    files = [
        ("documents", ("page", png(page("navy")))),
        ("documents", (None, "a text")),
        ("documents", (None, png(page("maroon")), "image/png")),
    ]
    fields = {"query": QUERY, "top_n": "2", "return_documents": "false"}

    reply = post_form(client, "/v2/rerank", files, fields)

    documents = [
        {"image": encoded(page("navy"))},
        {"text": "a text"},
        {"image": encoded(page("maroon"))},
    ]
    body = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}
    assert reply.status == 200
    assert reply.json["results"] == client.post("/v2/rerank", body).json["results"]


@pytest.mark.parametrize(
    ("files", "fields", "status", "message"),
    [
        pytest.param(
            [("inputs", ("a.gif", b"GIF89a"))], {}, 415, "PNG, JPEG, WebP or TIFF", id="a GIF"
        ),
        pytest.param(
            [("inputs", ("a.png", png(Image.new("1", (1000, 201)))))],
            {},
            413,
            "more than the limit of 200000",
            id="pixels",
        ),
        pytest.param(
            [("inputs", ("a.png", png(page())[:80]))],
            {},
            422,
            "an image is damaged",
            id="half of a PNG",
        ),
        pytest.param(
            [("inputs", ("a.png", b""))], {}, 400, "`inputs` cannot be empty", id="an empty file"
        ),
        pytest.param(
            [("inputs", (None, "a")), ("prompt_name", (None, "a")), ("prompt_name", (None, "b"))],
            {},
            422,
            "`prompt_name`: expected one part, got 2",
            id="a field twice",
        ),
        pytest.param(
            [("inputs", (None, "a"))], {"truncate": "maybe"}, 422, "`truncate`", id="no boolean"
        ),
        pytest.param(
            [("page", ("a.png", png(page())))], {}, 422, "`inputs`: Field required", id="no inputs"
        ),
        pytest.param(
            [("inputs", (None, "a"))] * 1001, {}, 422, "at most 1000 parts", id="many parts"
        ),
    ],
)
def test_forms_with_wrong_parts_are_refused(
    client: Client,
    files: list[tuple[str, Any]],
    fields: dict[str, Any],
    status: int,
    message: str,
) -> None:
    reply = post_form(client, "/embed_all", files, fields)
    assert (reply.status, message in reply.json["error"]) == (status, True), reply.json


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b"", "its last boundary is missing", id="empty"),
        pytest.param(
            b'--b\r\nContent-Disposition: form-data; name="inputs"\r\n\r\ntext\r\n--b\r\n',
            "its last boundary is missing",
            id="no end",
        ),
        pytest.param(b"--b\r\ntext\r\n--b--\r\n", "a part has no headers", id="no headers"),
        pytest.param(
            b"--b\r\nContent-Type: text/plain\r\n\r\ntext\r\n--b--", "has no name", id="no name"
        ),
        pytest.param(
            b'--b\r\nContent-Disposition: form-data; name="inputs"\r\n\r\n\xff\r\n--b--',
            "is not UTF-8",
            id="another encoding",
        ),
        pytest.param(
            b"--b\r\nContent-Disposition: form-data; name*=a; name*0=b\r\n\r\ntext\r\n--b--",
            "has no name",
            id="a malformed encoded name",
        ),
    ],
)
def test_bodies_that_are_no_forms_are_refused(client: Client, body: bytes, reason: str) -> None:
    content_type = "multipart/form-data; boundary=b"
    reply = client.request("POST", "/embed_all", body, content_type=content_type)
    assert (reply.status, reply.json["error_type"]) == (400, "Validation")
    assert "not a valid form" in reply.json["error"]
    assert reason in reply.json["error"]


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        pytest.param("/tokenize", "multipart/form-data; boundary=b", id="a route without images"),
        pytest.param("/embed_all", "multipart/form-data", id="no boundary"),
        pytest.param("/embed_all", "image/png", id="a file alone"),
        pytest.param(
            "/embed_all",
            "multipart/form-data; boundary*=a; boundary*0=b",
            id="a malformed encoded boundary",
        ),
    ],
)
def test_other_types_of_bodies_are_refused(client: Client, path: str, content_type: str) -> None:
    reply = client.request("POST", path, png(page()), content_type=content_type)
    assert (reply.status, "expected a body" in reply.json["error"]) == (415, True)


def test_a_file_with_line_breaks_and_hyphens_is_read_as_it_is() -> None:
    content = b"\r\n--\r\n--boundar\r\n\r\n"
    head = b'--boundary \r\nContent-Disposition: form-data; filename="a\r;b"; name="inputs"\r\n\r\n'
    fields = parse_form(head + content + b"\r\n--boundary--\r\n", b"boundary")
    assert fields == {"inputs": [ImageData(content)]}


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        pytest.param(b"; name=inputs", "x", id="a name without quotes"),
        pytest.param(b';Name = "inputs"', "x", id="upper case and spaces"),
        pytest.param(b"; name=inputs; filename*=UTF-8''%C3%A4.png", None, id="an encoded name"),
        pytest.param(b'; name="inputs"; filename="C:\\new\\"', None, id="a name of Windows"),
        pytest.param(b'; filename="a\\";name=b.png"; name="inputs"', None, id="an escaped quote"),
    ],
)
def test_parameters_of_a_part_are_read(parameters: bytes, value: str | None) -> None:
    head = b"--b\r\ncontent-disposition: Form-Data" + parameters + b"\r\n\r\n"
    expected = ImageData(b"x") if value is None else value
    assert parse_form(head + b"x\r\n--b--", b"b") == {"inputs": [expected]}


def test_a_form_of_long_headers_is_read_in_linear_time() -> None:
    disposition = b'Content-Disposition: form-data; name="inputs"; x="' + b";" * 8000 + b'"'
    part = b"--b\r\n" + disposition + b"\r\n\r\nx\r\n"
    started = time.process_time()
    fields = parse_form(part * 100 + b"--b--", b"b")
    assert len(fields["inputs"]) == 100
    assert time.process_time() - started < 2  # the parser of `email` takes about 10 s


def test_more_pixels_than_are_decoded_at_once_are_refused(parts: PageParts) -> None:
    image = {"image": encoded(page(size=(60, 80)))}
    service = parts.service(max_image_pixels=60 * 80)
    with serving(service) as client:
        assert client.post("/embed_all", {"inputs": [image] * 4}).status == 200
        reply = client.post("/embed_all", {"inputs": [image] * 5})
        assert (reply.status, "in several requests" in reply.json["error"]) == (413, True)
        with service.pixel_limit.acquire(60 * 80):
            assert client.post("/embed_all", {"inputs": [image] * 4}).status == 429
        assert client.post("/embed_all", {"inputs": [image] * 4}).status == 200


def test_a_body_over_the_limit_is_refused(parts: PageParts) -> None:
    with serving(parts.service(payload_limit=500)) as client:
        noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
        image = encoded(Image.fromarray(noise))
        assert client.post("/embed_all", {"inputs": {"image": image}}).status == 413


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/embed_all", {"inputs": [{"image": encoded(page())}]}, id="token vectors"),
        pytest.param(
            "/rerank", {"query": "a", "documents": [{"image": encoded(page())}]}, id="reranking"
        ),
    ],
)
def test_a_text_model_says_that_it_reads_no_images(
    text_client: Client,
    path: str,
    body: dict[str, Any],
) -> None:
    reply = text_client.post(path, body)
    assert (reply.status, reply.json["error_type"]) == (424, "Backend")
    assert "reads texts, and no images" in reply.json["error"]


def test_a_search_finds_pages_and_names_their_images(client: Client, parts: PageParts) -> None:
    body = {"query": QUERY, "hits": 3, "explain": True}
    answer = client.post("/v1/pages/search", body).json
    words = [token["token"] for token in answer["query"]["tokens"] if token["content"]]
    assert "".join(word.removeprefix("##") for word in words) == "somewords"
    assert len(answer["candidates"]) == 3
    for candidate in answer["candidates"]:
        assert candidate["image"] == image_path(candidate["docid"])
        shown = opened(client.get(candidate["image"]))
        assert shown.size == parts.collection.documents[candidate["docid"]].page.image().size
    (index,) = client.get("/v1/indexes").json["indexes"]
    assert index["features"]["images"] and index["features"]["explain"]


def test_thumbnails_keep_the_proportions(client: Client, parts: PageParts) -> None:
    document_id = next(iter(parts.collection.documents))
    full = opened(client.get(image_path(document_id)))
    small = opened(client.get(f"{image_path(document_id)}?width=50"))
    assert small.width == 50
    assert small.height == round(full.height * 50 / full.width)


def test_heat_maps_are_those_of_the_searcher(client: Client, parts: PageParts) -> None:
    document_id = list(parts.collection.documents)[-1]
    explanation = parts.service().searchable.searcher.explain(QUERY, [document_id])[document_id]
    image = parts.collection.documents[document_id].page.image()
    for token in (None, 3):
        address = f"{image_path(document_id)}?query={quote(QUERY)}"
        if token is not None:
            address += f"&token={token}"
        actual = np.asarray(opened(client.get(address)), float)
        expected = np.asarray(explanation.draw(image, token), float)
        assert np.abs(actual - expected).mean() < 6, "JPEG loses little"


def test_a_page_that_the_index_lacks_has_no_heat_map(parts: PageParts) -> None:
    first_page = next(iter(parts.collection.documents.values()))
    documents = {**parts.collection.documents, "new.png": replace(first_page, id="new.png")}
    served = Served(parts.model, "multi-vector", "tiny-colpali")
    searchable = Searchable("pages", parts.index, served, documents)
    with serving(Service([served], searchable=searchable)) as client:
        opened(client.get(image_path("new.png")))
        reply = client.get(f"{image_path('new.png')}?query=a")
    assert (reply.status, reply.json["error"]) == (404, "the index has no document 'new.png'")


def test_pooled_vectors_are_the_reason_that_there_is_no_heat_map(
    parts: PageParts,
    tmp_path: Path,
) -> None:
    page_ids = list(parts.collection.documents)
    vectors = [vectors[::2] for vectors in parts.index.token_vectors(page_ids)]
    tokens = r.TokenVectors.pack(page_ids, vectors, vectors[0].size(1), "fp16")
    index = r.LateIndex.build(tokens, tmp_path / "index")
    served = Served(parts.model, "multi-vector", "tiny-colpali")
    searchable = Searchable("pages", index, served, parts.collection.documents)
    with serving(Service([served], searchable=searchable)) as client:
        reply = client.get(f"{image_path(page_ids[0])}?query=a")
    assert (reply.status, "The vectors were pooled" in reply.json["error"]) == (424, True)


def test_an_index_of_pages_takes_no_texts(parts: PageParts, tmp_path: Path) -> None:
    index_folder = shutil.copytree(parts.folder / "index", tmp_path / "index")
    served = Served(parts.model, "multi-vector", "tiny-colpali")
    documents = dict(parts.collection.documents)
    page_id = next(iter(documents))
    with writing_server(index_folder, served, documents) as server:
        reply = server.put({"id": "text", "text": QUERY})
        assert (reply.status, server.log.n_pending) == (422, 0)
        assert "document 'text' is a text, and tiny-colpali encodes only" in reply.json["error"]
        assert server.delete(page_id).status == 200
        assert server.client.get(f"/v1/papers/image/{quote(page_id)}").status == 404
        (index,) = server.client.get("/v1/indexes").json["indexes"]
        assert index["features"]["images"]
        assert server.put({"id": "text", "text": QUERY}).status == 422


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        pytest.param(image_path("no-such-page.png"), 404, "no document", id="unknown id"),
        pytest.param(image_path("../model/config.json"), 404, "no document", id="path"),
        pytest.param("/v1/pages/image/%2Fetc%2Fpasswd", 404, "no document", id="absolute path"),
        pytest.param("FIRST?width=0", 422, "`width` expected an integer", id="width of 0"),
        pytest.param("FIRST?token=1", 422, "`token` requires `query`", id="token alone"),
        pytest.param("FIRST?query=a&token=999", 422, "`token` expected a position", id="token"),
        pytest.param("FIRST?size=9", 422, "unknown query parameter", id="unknown parameter"),
    ],
)
def test_only_pages_of_the_collection_are_shown(
    client: Client,
    parts: PageParts,
    path: str,
    status: int,
    message: str,
) -> None:
    path = path.replace("FIRST", image_path(next(iter(parts.collection.documents))))
    reply = client.get(path)
    assert (reply.status, message in reply.json["error"]) == (status, True), reply.json


def test_a_file_that_is_gone_is_an_error_without_its_path(parts: PageParts) -> None:
    with serving(parts.service()) as client:
        document_id = next(name for name in parts.collection.documents if name.endswith(".png"))
        file = parts.collection.documents[document_id].page.file
        content = file.read_bytes()
        file.unlink()
        try:
            reply = client.get(image_path(document_id))
        finally:
            file.write_bytes(content)
    assert reply.status == 424
    assert str(file.parent) not in reply.json["error"]


def test_hits_of_a_text_index_are_explained_by_the_tokens_that_match(
    late: Any,
    collection: r.Collection,
    tmp_path: Path,
) -> None:
    texts = collection.contents()
    index = r.LateIndex.build(r.encode_texts(late, texts, kind="document"), tmp_path / "index")
    served = Served(late, "multi-vector", "colbert")
    searchable = Searchable("texts", index, served, collection.documents)
    with serving(Service([served], searchable=searchable)) as client:
        body = {"query": "csv files", "hits": 2, "explain": True}
        answer = client.post("/v1/texts/search", body).json
    for candidate in answer["candidates"]:
        matches = candidate["explanation"]["matches"]
        total = sum(match["similarity"] for match in matches)
        assert total == pytest.approx(candidate["score"], abs=len(matches) * 2**-10)
        assert [match["query_token"] for match in matches] == [
            token["token"] for token in answer["query"]["tokens"]
        ]
    assert "image" not in answer["candidates"][0]


def test_a_search_in_pooled_vectors_has_no_matches(
    late: Any,
    collection: r.Collection,
    tmp_path: Path,
) -> None:
    vectors = r.encode_texts(late, collection.contents(), kind="document")
    index = r.LateIndex.build(vectors, tmp_path / "index", pool_factor=2)
    served = Served(late, "multi-vector", "colbert")
    searchable = Searchable("texts", index, served, collection.documents)
    assert not searchable.features["explain"]
    segments: Any = Segments([index], [set()])
    assert not Searchable("texts", segments, served, collection.documents).features["explain"]
    with serving(Service([served], searchable=searchable)) as client:
        reply = client.post("/v1/texts/search", {"query": "csv files", "explain": True})
        assert client.post("/v1/texts/search", {"query": "csv files"}).status == 200
    assert (reply.status, "without --pool-factor" in reply.json["error"]) == (422, True)


def test_a_search_says_why_vectors_of_other_texts_explain_nothing(
    late: Any,
    collection: r.Collection,
    tmp_path: Path,
) -> None:
    vectors = r.encode_texts(late, collection.contents(), kind="document")
    index = r.LateIndex.build(vectors, tmp_path / "index")
    served = Served(late, "multi-vector", "colbert")
    documents = {
        name: replace(document, text=f"{document.text} More words.")
        for name, document in collection.documents.items()
    }
    segments: Any = Segments([index], [set()])
    searchable = Searchable("texts", segments, served, documents)
    with serving(Service([served], searchable=searchable)) as client:
        reply = client.post("/v1/texts/search", {"query": "csv files", "explain": True})
    assert reply.status == 200, reply.json
    assert "expected one vector per token" in reply.json["query"]["explanation_error"]
    assert reply.json["candidates"]
    assert not any("matches" in hit["explanation"] for hit in reply.json["candidates"])


def count_decoded_images(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, for each page that is decoded, how many images are in memory."""
    images: list[weakref.ref[Any]] = []
    n_images_alive: list[int] = []
    decode = Page.image

    def decode_and_count(page: Page, *args: Any) -> Any:
        image = decode(page, *args)
        images.append(weakref.ref(image))
        n_images_alive.append(sum(reference() is not None for reference in images))
        return image

    monkeypatch.setattr(Page, "image", decode_and_count)
    return n_images_alive


def test_pages_are_explained_one_after_the_other(
    parts: PageParts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_images_alive = count_decoded_images(monkeypatch)
    explanations = parts.service().searchable.searcher.explain(QUERY, parts.collection.documents)
    assert explanations.keys() == parts.collection.documents.keys()
    assert max(n_images_alive) <= 2


def test_a_search_holds_the_images_of_a_few_candidates_at_a_time(
    parts: PageParts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_images_alive = count_decoded_images(monkeypatch)
    monkeypatch.setattr(searching, "PAGES_AT_ONCE", 2, raising=False)
    test_pages_that_words_find_are_reranked_by_their_images(parts)
    assert len(n_images_alive) > 7
    assert max(n_images_alive[:7]) <= 4  # two, and two that have just been encoded


def test_pages_that_words_find_are_reranked_by_their_images(parts: PageParts) -> None:
    """BM25 finds pages by a text that they also have; the model encodes their images."""
    documents = {
        name: replace(document, text=f"page {number}")
        for number, (name, document) in enumerate(parts.collection.documents.items())
    }
    index = r.BM25Index.build({name: item.contents for name, item in documents.items()})
    served = Served(parts.model, "multi-vector", "tiny-colpali")
    searchable = Searchable("words", index, documents=documents, late=served)
    with serving(Service([served], searchable=searchable)) as client:
        body = {"query": "page", "hits": 7, "rerank": True}
        answer = client.post("/v1/words/search", body).json
    scores = {candidate["docid"]: candidate["score"] for candidate in answer["candidates"]}
    images = [documents[name].page.image() for name in scores]
    model = parts.model
    expected = model.similarity(
        model.encode_query(["page"]),
        model.encode_document(images, show_progress_bar=False),
    )[0].tolist()
    assert list(scores.values()) == pytest.approx(expected, abs=1e-3)


def test_texts_and_pages_that_words_find_are_reranked_together(parts: PageParts) -> None:
    documents = {
        name: replace(document, text=f"page {number}")
        for number, (name, document) in enumerate(parts.collection.documents.items())
    }
    documents["a text"] = Document("a text", "", "page of text")
    index = r.BM25Index.build({name: item.contents for name, item in documents.items()})
    served = Served(parts.model, "multi-vector", "tiny-colpali")
    searchable = Searchable("words", index, documents=documents, late=served)
    with serving(Service([served], searchable=searchable)) as client:
        body = {"query": "page", "hits": len(documents), "rerank": True}
        answer = client.post("/v1/words/search", body).json
    scores = {candidate["docid"]: candidate["score"] for candidate in answer["candidates"]}
    model = parts.model
    contents = [item.page.image() if item.page else item.text for item in documents.values()]
    expected = [
        model.similarity(
            model.encode_query(["page"]),
            model.encode_document([content], show_progress_bar=False),
        ).item()
        for content in contents
    ]
    assert [scores[name] for name in documents] == pytest.approx(expected, abs=1e-3)
