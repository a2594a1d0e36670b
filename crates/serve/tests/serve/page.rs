//! The page at `/` in a headless browser.

use std::{io::Write, process::Command};

use axum::{Router, response::Html, routing::get};
use kv_serve::router;
use serde_json::json;

use super::client::{Server, Settings};

/// Returns the browser that `KV_BROWSER` names, or one that is installed.
fn browser() -> Option<String> {
    if let Ok(named) = std::env::var("KV_BROWSER") {
        return Some(named);
    }
    let names = ["chromium-headless-shell", "chromium", "google-chrome"];
    let runs = |name: &&str| Command::new(name).arg("--version").output().is_ok();
    let found = names.into_iter().find(runs).map(Into::into);
    if found.is_none() {
        let why = "no browser is installed, and KV_BROWSER names none";
        writeln!(std::io::stderr().lock(), "SKIPPED a test of the page: {why}").unwrap();
    }
    found
}

/// Opens a page for some milliseconds of the browser's time. Returns its elements and the log.
fn open(browser: &str, url: &str, time: usize) -> (String, String) {
    let run = Command::new(browser)
        .arg(format!("--virtual-time-budget={time}"))
        .args(["--headless", "--no-sandbox", "--disable-gpu"])
        .args(["--enable-logging=stderr", "--dump-dom", url])
        .output()
        .unwrap();
    let [dom, log] = [run.stdout, run.stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
    assert!(run.status.success(), "{log}");
    (dom, log)
}

/// Serves the page with a script after its own. Returns the address of the page.
fn with_script(server: &Server, script: &str) -> String {
    let page = Html(format!("{}<script>{script}</script>", server.get("/", "").body));
    let routes = Router::new().route("/scripted", get(|| async { page }));
    let address = server.also_serve(routes.merge(router(server.app.clone())));
    format!("http://{address}/scripted#Who%20is%20Jane?")
}

/// The page answers a message, shows the numbers of the server, and logs no error.
#[test]
fn the_page_chats_and_watches() {
    let server = Server::new(Settings { context: 1024, ..Settings::default() });
    let page = server.get("/", "");
    assert!(page.body.contains("<title>kv-serve</title>"));
    assert!(page.head.contains("content-security-policy: frame-ancestors 'none'"), "{page:?}");
    let Some(browser) = browser() else { return };
    let messages = json!([{"role": "user", "content": "Who is Jane?"}]);
    let body = json!({"messages": messages, "max_tokens": 512, "temperature": 0});
    let answer = server.post("/v1/chat/completions", &body).ok();
    let answer = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let send = "at('temperature').value = 0; at('form').requestSubmit();";
    let (dom, log) = open(&browser, &with_script(&server, send), 20_000);
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

/// A link only fills in a text, because any site can have such a link.
#[test]
fn links_send_nothing() {
    let Some(browser) = browser() else { return };
    let server = Server::new(Settings::default());
    let show = "document.title = 'filled in: ' + at('text').value;";
    let (dom, _) = open(&browser, &with_script(&server, show), 3000);
    assert!(dom.contains("<title>filled in: Who is Jane?</title>"), "{dom}");
    assert!(!dom.contains("class=\"user\""), "{dom}");
}

/// A new conversation has no message of an answer that still ran when it began.
#[test]
fn new_conversations_are_empty() {
    let Some(browser) = browser() else { return };
    let server = Server::new(Settings { context: 1024, ..Settings::default() });
    let script = "
        const real = window.fetch;
        window.fetch = (url, options) => {
          if (options.body) {
            const asked = document.createElement('pre');
            asked.textContent = JSON.stringify(JSON.parse(options.body).messages);
            document.body.append(asked);
          }
          return real(url, options);
        };
        at('form').requestSubmit();
        setTimeout(() => at('new').click(), 100);
        setTimeout(() => {
          at('text').value = 'Hello';
          at('form').requestSubmit();
        }, 200);";
    let (dom, log) = open(&browser, &with_script(&server, script), 3000);
    for asked in ["Who is Jane?", "Hello"] {
        let asked = json!([{"role": "user", "content": asked}]);
        assert!(dom.contains(&format!("<pre>{asked}</pre>")), "{dom} lacks {asked}: {log}");
    }
}
