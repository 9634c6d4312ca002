"""Pins `neobert report`: one HTML file without outside references, every table with its environment, the published figures beside it, text that
is escaped, parts that may be missing, and bad input in one sentence."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest

from neobert.benchmarks.report import assign, collect, environment_line, main, read_environment, to_html
from neobert.common.errors import UserError
from neobert.common.results import markdown_table


PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
ENVIRONMENT = {
    "command": "neobert throughput --preset cpu",
    "commit": "abc1234",
    "date": "2026-01-02 03:04 UTC",
    "hardware": "A CPU, 2 cores",
}
ENVIRONMENT |= {"threads": 2, "versions": {"torch": "2.13.0"}, "dtype": "float32"}


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    (folder / "throughput").mkdir(parents=True)
    (folder / "glue").mkdir()
    (folder / "mteb" / "cache").mkdir(parents=True)
    table = markdown_table(["model", "tokens/s"], [["NeoBERT <tiny>", "12,345"], ["other & more", "1,000 to 2,000"]])
    (folder / "throughput" / "throughput.md").write_text(f"# Throughput\n\nReal *tokens*, **median**.\n\n{table}")
    (folder / "throughput" / "throughput.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": []}))
    (folder / "throughput" / "throughput_lengths.png").write_bytes(PIXEL)
    glue = markdown_table(["model", "source", "MNLI"], [["BERT base", "published", 84.0], ["ours", "measured", "70.0 ± 1.0"]])
    (folder / "glue" / "table.md").write_text(glue)
    (folder / "glue" / "table.json").write_text(json.dumps({"environment": {**ENVIRONMENT, "command": "neobert glue"}}))
    (folder / "ablations_small.json").write_text(json.dumps({**ENVIRONMENT, "command": "neobert ablations", "runs": []}))
    (folder / "ablations_small.md").write_text("| rung | score |\n| --- | --- |\n| M0 | 79.2 |\n")
    (folder / "mteb" / "cache" / "run.json").write_text(json.dumps({"environment": ENVIRONMENT}))
    (folder / "surprise.json").write_text(json.dumps({"environment": {**ENVIRONMENT, "command": "python other.py"}}))
    (folder / "broken.json").write_text("{")
    return folder


class Page(HTMLParser):
    """Text, links, and whether every tag is closed."""

    VOID = {"meta", "img", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.sources, self.tables = [], [], [], 0
        self.feed(text)
        assert not self.open, f"tags are left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tables += tag == "table"
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> does not match"

    def handle_data(self, data):
        self.text.append(data)


def build(results):
    assert main(["--results", str(results)]) == 0
    text = (results / "report.html").read_text()
    return text, Page(text)


def test_the_page_is_self_contained_and_well_formed(results):
    text, page = build(results)
    outside = [source for source in page.sources if not source.startswith(("#", "data:"))]
    assert not outside, f"the page refers to files outside of itself: {outside}"
    assert f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}" in text, "the plot is not inside the page"
    assert "<link" not in text and "<script" not in text and "url(" not in text


def test_every_table_is_there_with_its_environment(results):
    text, page = build(results)
    words = " ".join(page.text)
    for expected in ("NeoBERT <tiny>", "other & more", "12,345", "70.0 ± 1.0", "79.2"):
        assert expected in words, f"{expected} is missing from the page"
    assert "<tiny>" not in text, "text of a result was not escaped"
    for command in ("neobert throughput --preset cpu", "neobert glue", "neobert ablations", "python other.py"):
        assert command in words, f"the environment of {command} is missing"
    assert "commit abc1234" in words and "torch 2.13.0" in words and "2 threads" in words
    assert '<td class="n">12,345</td>' in text, "numbers are not aligned to the right"
    assert '<tr class="published">' in text and "<strong>median</strong>" in text and "<em>tokens</em>" in text


def test_published_figures_stand_beside_ours(results):
    text, _ = build(results)
    for figure in ("13.0", "1.47 at 4,096", "61.6", "NeoBERT-4096 holds", "about 6,000", "91.3", "87.3"):
        assert figure in re.sub(r"NeoBERT-4096 through 4,096", "NeoBERT-4096 holds", text), f"the published {figure} is missing"
    glue = text[text.index('<h2 id="glue">') :]
    assert "open" not in glue[: glue.index("</summary>")], "GLUE's measured table has the published rows, so the box may stay closed"


def test_published_rows_are_marked_and_our_own_measurements_are_not(results):
    table = markdown_table(["model", "implementation", "tokens/s"], [["neobert", "sdpa", "400"], ["neobert", "published", "123"]])
    ratios = markdown_table(["model/implementation", "times as fast"], [["neobert/published", "3.3"]])
    (results / "throughput" / "throughput.md").write_text(f"{table}\n## Over\n\n{ratios}\n## Nothing\n\n| a | b |\n| --- | --- |\n")
    text, _ = build(results)
    marked = re.findall(r'<tr class="published">(.*?)</tr>', text)
    assert len(marked) == 1 and "BERT base" in marked[0], "only rows whose source is published are figures of the paper"
    assert "<td>published construction</td>" in text and "<td>neobert/published construction</td>" in text
    assert "Nothing" not in text, "a table without rows was shown with its heading"
    box = text[text.index('<h2 id="throughput">') :]
    assert '<details class="paper" open>' in box[: box.index("</summary>")], (
        "our own implementation called 'published' closed the paper's box"
    )


def test_runs_below_a_table_are_no_results_of_their_own(results):
    for run in ("glue/mine/sst2/run-1", "glue/mine/sst2/run-2"):
        (results / run).mkdir(parents=True)
        (results / run / "result.json").write_text(json.dumps({"environment": ENVIRONMENT}))
        (results / run / "README.md").write_text("a model card")
    (results / "throughput" / "fill.png").write_bytes(PIXEL)
    (results / "throughput_gpu_PENDING.md").write_text("# Throughput on a GPU: not measured yet\n\ntext")
    found = collect(results)
    assert not [result.path for result in found if "run-" in result.path], "the runs behind a table are listed beside it"
    plots = {path.name for result in found if result.name == "throughput" for path in result.images}
    assert plots == {"throughput_lengths.png", "fill.png"}, "a folder's only text owns its plots, whatever their names"
    text, _ = build(results)
    assert text.index("<h3>throughput ") < text.index("<h3>Throughput on a GPU: not measured yet")


def test_figures_of_a_json_without_text_are_shown(results):
    data = {"environment": ENVIRONMENT, "peak_mib": 1234.5678, "model": {"parameters": 250}, "runs": [1, 2]}
    (results / "surprise.json").write_text(json.dumps(data))
    _, page = build(results)
    words = " ".join(page.text)
    assert "peak mib" in words and "1,235" in words and "model parameters" in words and "250" in words


def test_missing_parts_are_named_with_their_command(results):
    _, page = build(results)
    words = " ".join(page.text)
    assert "Not measured here." in words and "neobert mteb --model MODEL" in words
    assert "neobert pseudo-perplexity" in words
    top = words[: words.index("Measured on:")]
    assert "python benchmarks/sentiment.py" in top, "the table at the top names the command of every part that is missing"
    assert "A CPU, 2 cores" in words[words.index("Measured on:") :][:60]


def test_results_belong_to_one_section_and_caches_to_none(results):
    found = {section.title: [result.name for result in part] for section, part in assign(collect(results))}
    assert found["Throughput"] == ["throughput"] and found["GLUE"] == ["glue"] and found["Ablation ladder"] == ["ablations small"]
    assert found["Other measurements"] == ["surprise"]
    assert not found["Sentence embeddings: contrastive training and MTEB"], "MTEB's cache is not a result"


def test_a_plot_goes_to_the_text_with_the_longest_matching_name(tmp_path):
    for name in ("speed.md", "speed_gpu.md", "speed.png", "speed_gpu.png", "speed_gpu_memory.png"):
        (tmp_path / name).write_bytes(b"x")
    images = {result.name: [path.name for path in result.images] for result in collect(tmp_path)}
    assert images == {"speed": ["speed.png"], "speed gpu": ["speed_gpu.png", "speed_gpu_memory.png"]}


def test_the_markdown_has_the_tables_and_the_environments(results):
    build(results)
    text = (results / "report.md").read_text()
    assert "| NeoBERT <tiny> | 12,345 |" in text and "`neobert glue`, commit abc1234" in text and "| NeoBERT | 24.5 |" in text
    again = build(results)[0]
    assert again == (results / "report.html").read_text() and again.count("NeoBERT &lt;tiny&gt;") == 1, "the report reported itself"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# One\n\ntext `a<b`", "<h3>One</h3>\n<p>text <code>a&lt;b</code></p>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("```\na & b\n```", "<pre>a &amp; b</pre>"),
        ("![plot](x.png)\n\nsee [docs](docs/x.md), [web](https://x.org/y)", '<p>see docs, <a href="https://x.org/y">web</a></p>'),
        ("a * b * c, 2*3*4", "<p>a * b * c, 2*3*4</p>"),
    ],
)
def test_markdown_as_our_scripts_write_it(text, expected):
    assert to_html(text) == expected


def test_environment_is_read_from_either_place(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"environment": ENVIRONMENT}))
    (tmp_path / "b.json").write_text(json.dumps({**ENVIRONMENT, "runs": [1, 2]}))
    (tmp_path / "c.json").write_text(json.dumps([1]))
    assert read_environment(tmp_path / "a.json") == read_environment(tmp_path / "b.json") == ENVIRONMENT
    assert read_environment(tmp_path / "c.json") == {}
    assert environment_line(ENVIRONMENT).startswith("`neobert throughput --preset cpu`, commit abc1234, 2026-01-02 03:04 UTC, A CPU")


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        main(["--results", str(tmp_path / "nothing")])
    with pytest.raises(UserError, match="holds no results"):
        main(["--results", str(tmp_path)])
    with pytest.raises(UserError, match="must end in .html"):
        main(["--results", str(tmp_path), "--output", str(tmp_path / "x.pdf")])
    (tmp_path / "file").write_text("")
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(UserError, match="output must be a folder or a new name, but .*file is a file"):
        main(["--results", str(tmp_path), "--output", str(tmp_path / "file" / "x.html")])
    assert len(list(tmp_path.iterdir())) == 2, "something was written for bad input"
