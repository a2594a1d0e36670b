//! The page at `/` in a headless browser.

use std::{io::Write, process::Command};

use serde_json::json;

use super::client::{Server, Settings};

/// Returns the browser that `KV_BROWSER` names, or one that is installed.
fn browser() -> Option<String> {
    if let Ok(named) = std::env::var("KV_BROWSER") {
        return Some(named);
    }
    let names = ["chromium-headless-shell", "chromium", "google-chrome"];
    let runs = |name: &&str| Command::new(name).arg("--version").output().is_ok();
    names.into_iter().find(runs).map(Into::into)
}

/// The page answers a message, shows the numbers of the server, and logs no error.
#[test]
fn the_page_chats_and_watches() {
    let server = Server::new(Settings { context: 1024, ..Settings::default() });
    assert!(server.get("/", "").body.contains("<title>kv-serve</title>"));
    let Some(browser) = browser() else {
        let why = "no browser is installed, and KV_BROWSER names none";
        writeln!(std::io::stderr().lock(), "SKIPPED the_page_chats_and_watches: {why}").unwrap();
        return;
    };
    let messages = json!([{"role": "user", "content": "Who is Jane?"}]);
    let body = json!({"messages": messages, "max_tokens": 512, "temperature": 0});
    let answer = server.post("/v1/chat/completions", &body).ok();
    let answer = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let run = Command::new(browser)
        .args(["--headless", "--virtual-time-budget=20000", "--no-sandbox", "--disable-gpu"])
        .args(["--enable-logging=stderr", "--dump-dom"])
        .arg(format!("http://{}/#Who%20is%20Jane?", server.address))
        .output()
        .unwrap();
    let (dom, log) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{log}");
    assert!(!log.contains("CONSOLE") && !log.contains("Uncaught"), "{log}");
    // The browser's time may end before the answer does.
    let (_, shown) = dom.split_once("<div class=\"assistant\">").unwrap();
    let shown = shown.split_once("</div>").unwrap().0;
    assert!(shown.len() > 20 && answer.starts_with(shown), "{shown:?} of {answer:?}");
    for part in [
        "<div class=\"user\">Who is Jane?</div>",
        "austen, cache k4v4, 1024 tokens",
        "<dt>generated tokens/s</dt>",
        "<dt>the same in f16</dt>",
    ] {
        assert!(dom.contains(part), "{dom} lacks {part}");
    }
    assert!(!dom.contains("class=\"error\""), "{dom}");
}
