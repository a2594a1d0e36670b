//! Models of the hub, served by a local one.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
};

use crate::common::{Outcome, Workspace, kv_eval_in};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const OLD_COMMIT: &str = "fedcba9876543210fedcba9876543210fedcba98";

/// Files by repository, and by path within it.
type Repositories = BTreeMap<&'static str, BTreeMap<String, Vec<u8>>>;

/// A hub that answers downloads until the test ends.
struct Hub {
    endpoint: String,
    /// All requests with their ranges: `GET /PATH bytes=0-`.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn serve(repositories: Repositories) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = asked.clone();
        let repositories = Arc::new(repositories);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (log, repositories) = (log.clone(), repositories.clone());
                thread::spawn(move || answer(&stream.unwrap(), &repositories, &log));
            }
        });
        Self { endpoint, asked }
    }

    fn asked(&self, part: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|line| line.contains(part)).count()
    }

    /// Counts the downloads of files that contain `part`.
    fn downloaded(&self, part: &str) -> usize {
        let asked = self.asked.lock().unwrap();
        asked.iter().filter(|line| line.contains(part) && line.ends_with(" bytes=0-")).count()
    }

    /// Returns the program with this hub and a cache in `home`.
    fn run(&self, home: &str, args: &[&str]) -> Outcome {
        let environment = [
            ("HF_ENDPOINT", self.endpoint.as_str()),
            ("HF_HOME", home),
            ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
            ("NO_PROXY", "127.0.0.1"),
            ("no_proxy", "127.0.0.1"),
        ];
        kv_eval_in(args, &environment)
    }
}

fn answer(stream: &TcpStream, repositories: &Repositories, log: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let Some(request) = lines.next() else { return };
    let headers: Vec<String> = lines.by_ref().take_while(|line| !line.is_empty()).collect();
    let range = headers.iter().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("range").then(|| value.trim().to_string())
    });
    let mut words = request.split(' ');
    let (method, target) = (words.next().unwrap(), words.next().unwrap());
    log.lock().unwrap().push(format!("{method} {target} {}", range.as_deref().unwrap_or("")));
    let path = target.split('?').next().unwrap();
    let (status, mut headers, mut body) = match found(path, repositories) {
        Some((headers, body)) => ("200 OK", headers, body),
        None => ("404 Not Found", String::new(), b"{}".to_vec()),
    };
    let status = match range.filter(|_| status == "200 OK") {
        Some(range) => {
            let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            let first: usize = first.parse().unwrap();
            let last = last.parse().unwrap_or(body.len() - 1);
            headers += &format!("content-range: bytes {first}-{last}/{}\r\n", body.len());
            body = body[first..=last].to_vec();
            "206 Partial Content"
        }
        None => status,
    };
    let length = body.len();
    let mut stream = stream;
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{headers}connection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    if method != "HEAD" {
        stream.write_all(&body).unwrap();
    }
}

/// Returns headers and body for `path`.
fn found(path: &str, repositories: &Repositories) -> Option<(String, Vec<u8>)> {
    let json = "content-type: application/json\r\n".to_string();
    let commit_of = |revision: &str| match revision {
        "main" | COMMIT => Some(COMMIT),
        "old" | OLD_COMMIT => Some(OLD_COMMIT),
        _ => None,
    };
    for (name, files) in repositories {
        if let Some(rest) = path.strip_prefix(&format!("/api/models/{name}/")) {
            let commit = commit_of(rest.strip_prefix("revision/")?)?;
            let siblings: Vec<_> =
                files.keys().map(|path| serde_json::json!({ "rfilename": path })).collect();
            let answer = serde_json::json!({ "id": name, "sha": commit, "siblings": siblings });
            return Some((json, answer.to_string().into_bytes()));
        }
        if let Some(rest) = path.strip_prefix(&format!("/{name}/resolve/")) {
            let (revision, file) = rest.split_once('/')?;
            let (commit, bytes) = (commit_of(revision)?, files.get(file)?);
            let etag = format!("{commit}-{}", file.replace('.', "-"));
            return Some((
                format!("etag: \"{etag}\"\r\nx-repo-commit: {commit}\r\n"),
                bytes.clone(),
            ));
        }
    }
    None
}

/// Returns the files in `folder` and other files that a repository may have.
fn files_of(folder: &str) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.file_name().unwrap().to_str().unwrap().to_string(), fs::read(path).unwrap())
        })
        .collect()
}

fn ppl<'a>(model: &'a str, text: &'a str) -> Vec<&'a str> {
    vec!["ppl", "--model", model, "--text", text, "--tokens", "40"]
}

#[test]
fn a_model_is_downloaded_once_and_in_one_kind_of_weights() {
    let space = Workspace::new();
    let mut files = files_of(&space.model());
    files.insert("pytorch_model.bin".into(), b"not to be downloaded".to_vec());
    files.insert("other.gguf".into(), b"nor this".to_vec());
    files.insert("onnx/config.json".into(), b"nor that".to_vec());
    let hub = Hub::serve([("someone/tiny-llama", files)].into());
    let (home, text) = (space.path("home"), space.text());

    let here = kv_eval_in(&ppl(&space.model(), &text), &[]);
    let first = hub.run(&home, &ppl("someone/tiny-llama", &text));
    assert_eq!(first.code, 0, "{}", first.stderr);
    assert!(first.stdout.starts_with("someone/tiny-llama on flex"), "{}", first.stdout);
    let row = |outcome: &Outcome| {
        let row = outcome.stdout.lines().find(|line| line.starts_with("float")).unwrap();
        row.split_whitespace().nth(1).unwrap().to_string()
    };
    assert_eq!(row(&first), row(&here));
    assert!(first.stderr.contains("note: downloading"), "{}", first.stderr);
    let others = ["pytorch_model.bin", "other.gguf", "onnx"].map(|part| hub.asked(part));
    assert_eq!(others, [0, 0, 0]);
    let files = "GET /someone/tiny-llama/resolve";
    assert!(hub.downloaded(files) >= 3);

    let before = hub.asked(files);
    let again = hub.run(&home, &ppl("someone/tiny-llama", &text));
    assert_eq!((again.code, hub.asked(files)), (0, before), "{}", again.stderr);
    assert!(!again.stderr.contains("downloading"), "{}", again.stderr);

    // Without a hub, the downloaded files are used.
    let gone = Hub { endpoint: "http://127.0.0.1:9".into(), asked: hub.asked.clone() };
    let offline = gone.run(&home, &ppl("someone/tiny-llama", &text));
    assert_eq!((offline.code, row(&offline)), (0, row(&first)), "{}", offline.stderr);
    assert!(offline.stderr.contains("did not answer"), "{}", offline.stderr);
    let nothing = gone.run(&space.path("empty"), &ppl("someone/tiny-llama", &text));
    assert_eq!(nothing.code, 1);
    assert!(nothing.stderr.starts_with("error: model someone/tiny-llama: no such path here"));
}

#[test]
fn pytorch_weights_are_used_without_safetensors() {
    let space = Workspace::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/pytorch-tiny");
    let mut files = files_of(path.to_str().unwrap());
    files.insert("tokenizer.json".into(), fs::read(space.path("model/tokenizer.json")).unwrap());
    let hub = Hub::serve([("someone/old", files)].into());
    let args = ["bench", "prefill", "--model", "someone/old", "--cache", "float"];
    let outcome = hub.run(&space.path("home"), &args);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let weights = format!("GET /someone/old/resolve/{COMMIT}/pytorch_model.bin");
    assert_eq!(hub.downloaded(&weights), 1);
    assert!(outcome.stdout.starts_with("someone/old on flex"), "{}", outcome.stdout);
}

#[test]
fn gguf_files_are_named_after_the_id() {
    let space = Workspace::new();
    let files: BTreeMap<String, Vec<u8>> =
        ["a.Q4_0.gguf", "a.Q8_0.gguf"].map(|name| (name.into(), b"GGUF no".to_vec())).into();
    let hub = Hub::serve([("someone/gguf", files)].into());
    let (home, text) = (space.path("home"), space.text());
    let outcome = hub.run(&home, &ppl("someone/gguf", &text));
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("a.Q4_0.gguf, a.Q8_0.gguf"), "{}", outcome.stderr);
    // Only this file is downloaded, and it is not a GGUF file.
    let outcome = hub.run(&home, &ppl("someone/gguf/a.Q8_0.gguf", &text));
    assert_eq!(outcome.code, 1);
    assert!(outcome.stderr.contains("a.Q8_0.gguf: "), "{}", outcome.stderr);
    assert_eq!((hub.asked("a.Q4_0.gguf"), hub.downloaded("GET /someone/gguf/resolve")), (0, 1));
}

#[test]
fn revisions_need_a_model_of_the_hub() {
    let space = Workspace::new();
    let hub = Hub::serve([("someone/tiny-llama", files_of(&space.model()))].into());
    let (home, text, model) = (space.path("home"), space.text(), space.model());
    let with = |model: &str, revision: &str| {
        hub.run(&home, &[&ppl(model, &text)[..], &["--revision", revision]].concat())
    };
    let old = with("someone/tiny-llama", "old");
    assert_eq!(old.code, 0, "{}", old.stderr);
    let at = |commit: &str| hub.asked(&format!("GET /someone/tiny-llama/resolve/{commit}"));
    assert!(at(OLD_COMMIT) > 0 && at(COMMIT) == 0);
    let unknown = with("someone/tiny-llama", "no-such-branch");
    assert_eq!(unknown.code, 1);
    assert!(unknown.stderr.starts_with("error: model someone/tiny-llama"), "{}", unknown.stderr);
    let local = with(&model, "old");
    assert_eq!(local.code, 1);
    assert!(local.stderr.starts_with("error: revision old: model"), "{}", local.stderr);
}
