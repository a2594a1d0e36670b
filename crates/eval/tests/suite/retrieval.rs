//! Retrieval of values from long prompts.

use std::path::Path;

use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_eval::{Error, Haystack, RetrievalPlan, RetrievalTask, Spelling, retrieval};
use kv_models::{ModelCacheConfig, load};

use crate::common::{assert_one_line, kv_eval};

const AUSTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");

fn plan() -> RetrievalPlan {
    RetrievalPlan {
        tasks: RetrievalTask::ALL.into(),
        keys: Spelling::Word,
        values: Spelling::Number,
        haystack: Haystack::Repeated,
        contexts: vec![800, 1024],
        depths: vec![0, 100],
        needles: 2,
        samples: 1,
        seed: 3,
        bos: None,
    }
}

fn caches() -> Vec<ModelCacheConfig> {
    let float = ModelCacheConfig::from(KvCacheConfig::float());
    vec![float, "k4v4-g16-r16".parse().unwrap()]
}

/// A model of novels answers nothing, but every prompt is asked with every cache, and fills its
/// context.
#[test]
fn every_prompt_is_asked_with_every_cache() {
    let device = On::<Flex>::open().unwrap();
    let loaded = load(AUSTEN, &device).unwrap();
    let tokenizer = loaded.tokenizer.unwrap();
    let mut seen = 0;
    let found =
        retrieval(&device, &loaded.model, &tokenizer, &caches(), plan(), |_| seen += 1).unwrap();
    assert_eq!((found.rows.len(), seen), (40, 40));
    for rows in found.rows.chunks(2) {
        let [float, quantized] = rows else { panic!("two caches") };
        assert_eq!((float.cache.as_str(), quantized.cache.as_str()), ("float", "k4v4-g16-r16"));
        assert_eq!((float.depth, float.tokens), (quantized.depth, quantized.tokens));
        // Room for the answer, and no room for another sentence.
        let expected =
            if !matches!(float.task, RetrievalTask::MultiValue | RetrievalTask::MultiQuery) {
                1
            } else {
                2
            };
        assert_eq!(float.found.len(), expected);
        assert!(float.tokens + 16 < float.context, "{float:?}");
        assert!(float.tokens + 480 > float.context, "{float:?}");
    }
    let again = retrieval(&device, &loaded.model, &tokenizer, &caches(), plan(), |_| ()).unwrap();
    let answers = |found: &kv_eval::Retrieval| -> Vec<String> {
        found.rows.iter().map(|row| row.answer.clone()).collect()
    };
    assert_eq!(answers(&found), answers(&again));
}

#[test]
fn settings_out_of_range_are_refused() {
    let device = On::<Flex>::open().unwrap();
    let loaded = load(AUSTEN, &device).unwrap();
    let tokenizer = loaded.tokenizer.unwrap();
    for (plan, parts) in [
        (RetrievalPlan { contexts: vec![800, 1025], ..plan() }, ["context 1025", "1024 positions"]),
        (RetrievalPlan { contexts: vec![100], ..plan() }, ["context 100", "of the question"]),
        (RetrievalPlan { depths: vec![0, 101], ..plan() }, ["depth 101", "100 percent"]),
        (RetrievalPlan { samples: 0, ..plan() }, ["samples 0", "at least 1"]),
        (RetrievalPlan { needles: 0, ..plan() }, ["needles 0", "from 1 to"]),
        (RetrievalPlan { needles: 65, ..plan() }, ["needles 65", "from 1 to 64"]),
        (
            RetrievalPlan { haystack: Haystack::of_text("So it was. Yes!"), ..plan() },
            ["text of 2 sentences", "800 tokens"],
        ),
    ] {
        let none = |_: &kv_eval::RetrievalRow| ();
        let error =
            retrieval(&device, &loaded.model, &tokenizer, &caches(), plan, none).unwrap_err();
        assert!(matches!(error, Error::Plan { .. }), "{error:?}");
        let error = error.to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let needle = |args: &[&str]| kv_eval(&[&["needle", "--model", AUSTEN], args].concat());
    assert_one_line(&needle(&["--task", "single", "--text", "none.txt"]), &["text none.txt"]);
    let text = format!("{AUSTEN}/heldout.txt");
    let several = needle(&["--text", &text, "--context", "512,1024"]);
    assert_one_line(&several, &["context: passages have one"]);
}

#[test]
fn the_program_writes_a_page_with_heat_maps() {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report");
    let text = Path::new(AUSTEN).join("heldout.txt");
    let outcome = kv_eval(&[
        "needle",
        "--model",
        AUSTEN,
        "--task",
        "single",
        "--text",
        text.to_str().unwrap(),
        "--context",
        "600",
        "--depth",
        "0,50",
        "--cache",
        "k4v4-g16-r16",
        "--report",
        report.to_str().unwrap(),
    ]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.contains("single"), "{}", outcome.stdout);
    let page = std::fs::read_to_string(report.join("report.html")).unwrap();
    assert!(page.contains("<caption>single, k4v4-g16-r16</caption>"), "{page}");
}
