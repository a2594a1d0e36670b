//! The page of a timeline: one file, whose script runs in a browser.
//!
//! The browser is that of `KV_BROWSER`, or the first of the usual names that is installed: Chrome,
//! Chromium or its headless shell, as Debian's package `chromium-headless-shell` has it. Without
//! one, what only a browser can tell is not tested, and the test prints a note.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{fs, io::Write, path::Path, process::Command};

use kv_report::{
    Table, Timeline,
    timeline::{Bar, Kind, Label, Lane},
};
use serde_json::Value;

fn label(name: &str, group: &str, kind: Kind) -> Label {
    Label { name: name.into(), group: group.into(), kind }
}

fn bar(label: u32, row: u16, start: u64, end: u64) -> Bar {
    Bar { label, detail: None, row, start, end }
}

/// One second of two phases and a queue with a gap; a name would end the script if it were not
/// escaped.
fn timeline() -> Timeline {
    let mut table = Table::new(["operation", "total ms"]);
    table.push(["qkv", "300.0"]);
    Timeline {
        title: "A <run>".into(),
        facts: vec![("adapter".into(), "llvmpipe & co".into())],
        notes: vec!["What to know.".into()],
        labels: vec![
            label("prefill", "prefill", Kind::Phase),
            label("decode_1", "decode", Kind::Phase),
            label("L0/qkv", "qkv", Kind::Operation),
            label("idle before L0/qkv", "idle", Kind::Idle),
        ],
        details: vec!["Kernel</script><!--".into()],
        lanes: vec![
            Lane {
                name: "main".into(),
                bars: vec![
                    bar(1, 0, 600_000_000, 1_000_000_000),
                    bar(0, 0, 0, 600_000_000),
                    // Within the same pixel a short bar, and the start of a long one.
                    bar(2, 1, 99_999_000, 99_999_500),
                    bar(2, 1, 100_000_000, 400_000_000),
                ],
            },
            Lane {
                name: "queue".into(),
                bars: vec![
                    Bar { detail: Some(0), ..bar(2, 0, 150_000_000, 350_000_000) },
                    bar(3, 0, 350_000_000, 700_000_000),
                    Bar { detail: Some(0), ..bar(2, 0, 700_000_000, 900_000_000) },
                ],
            },
        ],
        tables: vec![("Operations".into(), table)],
    }
}

#[test]
fn the_page_stands_alone_and_holds_every_bar() {
    let page = timeline().html();
    for outside in ["http:", "https:", "src=", "href=", "url(", "import", "fetch("] {
        assert!(!page.contains(outside), "{outside}");
    }
    for part in ["<h1>A &lt;run&gt;</h1>", "llvmpipe &amp; co", "<h2>Operations</h2>", "300.0"] {
        assert!(page.contains(part), "{part}");
    }
    assert_eq!(page.matches("</script>").count(), 2, "a name ends a script");
    let start = page.find("id=\"timeline\">").unwrap() + "id=\"timeline\">".len();
    let json = &page[start..start + page[start..].find("</script>").unwrap()];
    let data: Value = serde_json::from_str(json).unwrap();
    assert_eq!(data["details"][0], "Kernel</script><!--");
    let row = &data["lanes"][0]["rows"][0];
    // In order, each start from the one before.
    assert_eq!(row["labels"], serde_json::json!([0, 1]));
    assert_eq!(row["starts"], serde_json::json!([0, 600_000_000]));
    assert_eq!(row["lengths"], serde_json::json!([600_000_000, 400_000_000]));
    assert_eq!(data["lanes"][1]["rows"][0]["details"], serde_json::json!([1, 0, 1]));
}

#[test]
fn an_empty_timeline_is_a_page() {
    let page = Timeline { title: "Nothing".into(), ..Timeline::default() }.html();
    assert!(page.contains("\"lanes\":[]"));
}

/// A browser that only prints a page's elements paints one frame.
const FRAMES: &str = "<script>requestAnimationFrame = (draw) => setTimeout(draw, 16);</script>";

/// Sends user events to the page and writes the state after each into an element.
const USE: &str = r#"<script>
const events = [], at = (x, y, more) => {
  const box = canvas.getBoundingClientRect();
  return { clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true, ...more };
};
const canvas = document.getElementById("canvas"), tip = document.getElementById("tip");
const span = () => [Number(canvas.dataset.from), Number(canvas.dataset.to),
  Number(canvas.dataset.drawn)];
const soon = () => new Promise((done) => setTimeout(done, 60));
const x = (time) => 150 + (canvas.clientWidth - 150) * time / 1e9;
(async () => {
  events.push(["first", ...span()]);
  const pixel = canvas.getContext("2d").getImageData(x(3e8), 28, 1, 1).data;
  const long = canvas.getContext("2d").getImageData(x(3e8), 45, 1, 1).data;
  events.push(["painted", Math.min(...pixel), Math.min(...long)]);
  canvas.dispatchEvent(new PointerEvent("pointermove", at(x(2e8), 70)));
  events.push(["tip", tip.hidden, tip.textContent]);
  canvas.dispatchEvent(new PointerEvent("pointermove", at(x(5e8), 70)));
  events.push(["gap", tip.hidden, tip.textContent]);
  canvas.dispatchEvent(new PointerEvent("pointermove", at(x(9.5e8), 70)));
  events.push(["nothing", tip.hidden]);
  canvas.dispatchEvent(new WheelEvent("wheel", at(x(2e8), 70, { deltaY: -500 })));
  await soon();
  events.push(["zoomed", ...span()]);
  canvas.dispatchEvent(new PointerEvent("pointerdown", at(400, 70)));
  canvas.dispatchEvent(new PointerEvent("pointermove", at(300, 70)));
  canvas.dispatchEvent(new PointerEvent("pointerup", at(300, 70)));
  await soon();
  events.push(["panned", ...span()]);
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "0", bubbles: true }));
  await soon();
  events.push(["fitted", ...span()]);
  const phases = document.getElementById("phases");
  events.push(["phases", ...[...phases.options].map((option) => option.text)]);
  phases.value = "1";
  phases.dispatchEvent(new Event("change"));
  await soon();
  events.push(["phase", ...span()]);
  const find = document.getElementById("find");
  find.value = "L0/";
  find.dispatchEvent(new Event("input"));
  events.push(["found", document.getElementById("found").textContent]);
  document.getElementById("fit").click();
  await soon();
  canvas.dispatchEvent(new MouseEvent("dblclick", at(x(2e8), 45)));
  await soon();
  events.push(["bar", ...span()]);
})().catch((error) => events.push(["error", String(error)])).then(() => {
  const out = document.createElement("pre");
  out.id = "events";
  out.textContent = JSON.stringify(events);
  document.body.append(out);
});
</script>"#;

fn browser() -> Option<String> {
    if let Ok(named) = std::env::var("KV_BROWSER") {
        return Some(named);
    }
    let usual =
        ["chromium-headless-shell", "chromium", "google-chrome", "chrome", "chromium-browser"];
    let found = usual.iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    found.map(ToString::to_string)
}

/// The page's elements after its scripts have run.
fn opened(browser: &str, page: &Path) -> String {
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"])
        .args(["--virtual-time-budget=20000", "--dump-dom"])
        .arg(format!("file://{}", page.display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_browser_draws_zooms_and_tells() {
    let Some(browser) = browser() else {
        let why = "no browser is installed, and KV_BROWSER names none";
        writeln!(std::io::stderr().lock(), "SKIPPED a_browser_draws_zooms_and_tells: {why}")
            .unwrap();
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("page.html");
    let page = timeline().html().replace("<head>", &format!("<head>{FRAMES}"));
    fs::write(&path, page.replace("</body>", &format!("{USE}</body>"))).unwrap();
    let dom = opened(&browser, &path);
    let start =
        dom.find("<pre id=\"events\">").expect("the scripts ended") + "<pre id=\"events\">".len();
    let json = dom[start..start + dom[start..].find("</pre>").unwrap()]
        .replace("&lt;", "<")
        .replace("&gt;", ">");
    let events: Vec<Value> = serde_json::from_str(&json).unwrap();
    let of = |name: &str| {
        events.iter().find(|line| line[0] == name).unwrap_or_else(|| panic!("{name}: {json}"))
    };
    let span = |name| {
        let number = |i: usize| of(name)[i].as_f64().unwrap();
        (number(1), number(2), number(3))
    };
    assert_eq!(span("first"), (0.0, 1e9, 7.0));
    for bar in 1..3 {
        assert!(of("painted")[bar].as_u64().unwrap() < 235, "not drawn: {}", of("painted"));
    }
    let tip = of("tip")[2].as_str().unwrap();
    assert!(
        of("tip")[1] == false
            && tip.starts_with("L0/qkv\nKernel</script><!--\n200 ms, from 150 ms"),
        "{tip}"
    );
    let gap = of("gap")[2].as_str().unwrap();
    assert!(gap.starts_with("idle before L0/qkv\n350 ms"), "{gap}");
    assert_eq!(of("nothing")[1], true);
    // Towards what is under the pointer: the time there stays where it is.
    let (from, to, _) = span("zoomed");
    assert!((to - from - 1e9 * (-1.0f64).exp()).abs() < 1e6, "{from} to {to}");
    assert!(((2e8 - from) / (to - from) - 0.2).abs() < 0.01, "{from} to {to}");
    let (panned, end, _) = span("panned");
    assert!((end - panned - (to - from)).abs() < 1.0, "{panned} to {end}");
    let moved = (panned - from) / (to - from);
    assert!(moved > 0.05 && moved < 0.12, "100 of some 1200 pixels: {moved}");
    assert_eq!(span("fitted"), (0.0, 1e9, 7.0));
    assert_eq!(of("phases"), &serde_json::json!(["phases", "choose", "prefill", "decode_1"]));
    let (from, to, _) = span("phase");
    assert!(from > 5.8e8 && from < 6e8 && to > 1e9 && to < 1.02e9, "{from} to {to}");
    assert_eq!(of("found")[1], "5 bars, 1.05 s in all");
    let (from, to, _) = span("bar");
    assert!((from - 8.5e7).abs() < 1.0 && (to - 4.15e8).abs() < 1.0, "{from} to {to}");
}
