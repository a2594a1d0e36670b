//! Retrieval of values from long prompts.

use std::path::Path;

use kv_cubecl::{Flex, KvCacheConfig, On};
use kv_eval::{Error, Haystack, NeedleType, RetrievalPlan, RetrievalTask, retrieval};
use kv_models::{ModelCacheConfig, load};

use crate::{
    common::{assert_one_line, kv_eval},
    real_model::smollm2,
};

const AUSTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/austen");

fn plan() -> RetrievalPlan {
    use RetrievalTask::{MultiKey, MultiQuery, MultiValue, Single, ToolCall};
    RetrievalPlan {
        tasks: vec![Single, MultiKey, MultiValue, MultiQuery, ToolCall],
        keys: NeedleType::Word,
        values: NeedleType::Number,
        haystack: Haystack::Noise,
        contexts: vec![800, 1024],
        depths: vec![0, 100],
        count: 2,
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
    assert_eq!(plan().prompts(), 16);
    let found =
        retrieval(&device, &loaded.model, &tokenizer, &caches(), plan(), |_| seen += 1).unwrap();
    assert_eq!((found.rows.len(), seen), (32, 32));
    let sentence = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and \
                    back again.\n";
    let sentence = tokenizer.encode(sentence).unwrap().len();
    for rows in found.rows.chunks(2) {
        let [float, quantized] = rows else { panic!("two caches") };
        assert_eq!((float.cache.as_str(), quantized.cache.as_str()), ("float", "k4v4-g16-r16"));
        assert_eq!((float.depth, float.tokens), (quantized.depth, quantized.tokens));
        let (values, depths) = match float.task {
            RetrievalTask::MultiValue | RetrievalTask::MultiQuery => (2, [None; 2]),
            _ => (1, [Some(0), Some(100)]),
        };
        assert_eq!((float.found.len(), float.expected.len()), (values, values));
        assert!(depths.contains(&float.depth));
        // Tokens for the answer, and none for another sentence.
        let answer = 2 * tokenizer.encode(&float.expected.join(", ")).unwrap().len() + 16;
        let left = float.context - float.tokens;
        assert!(left >= answer && left < answer + sentence + 2, "{left}: {float:?}");
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
        (RetrievalPlan { contexts: vec![100], ..plan() }, ["context 100", "question and answer"]),
        (RetrievalPlan { depths: vec![0, 101], ..plan() }, ["depth 101", "100 percent"]),
        (RetrievalPlan { depths: vec![7, 7], ..plan() }, ["depth 7", "is given twice"]),
        (RetrievalPlan { contexts: vec![800, 800], ..plan() }, ["context 800", "given twice"]),
        (RetrievalPlan { samples: 0, ..plan() }, ["samples 0", "at least 1"]),
        (RetrievalPlan { count: 0, ..plan() }, ["count 0", "from 1 to"]),
        (RetrievalPlan { count: 65, ..plan() }, ["count 65", "from 1 to 64"]),
        (
            RetrievalPlan { haystack: Haystack::from_text("a", "So it was. Yes!"), ..plan() },
            ["text 2 sentences", "less than 800 tokens"],
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
    assert_one_line(&needle(&["--text", &text, "--no-bos"]), &["bos", "--task"]);
    assert_one_line(&needle(&["--text", &text, "--count", "2"]), &["--task"]);
    let cue = needle(&["--task", "single", "--cue", "2"]);
    assert_one_line(&cue, &["--cue", "cannot be used with"]);
    assert_one_line(&several, &["context 512,1024", "without --task"]);
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
    assert!(outcome.stderr.contains("report.html"), "{}", outcome.stderr);
}

#[test]
#[ignore = "needs SmolLM2: scripts/get-smollm2 or KV_SMOLLM2"]
fn smollm2_finds_a_number() {
    let device = On::<Flex>::open().unwrap();
    let loaded = load(smollm2(), &device).unwrap();
    let tokenizer = loaded.tokenizer.unwrap();
    let plan = RetrievalPlan {
        tasks: vec![RetrievalTask::Single],
        contexts: vec![600],
        depths: vec![0, 50, 100],
        ..plan()
    };
    let caches: Vec<_> = ["float", "kint8vint8"].map(|name| name.parse().unwrap()).into();
    let found = retrieval(&device, &loaded.model, &tokenizer, &caches, plan, |_| ()).unwrap();
    for row in &found.rows {
        assert_eq!(row.found, [true], "{row:?}");
        // Generation stops with the number.
        assert!(row.answer.ends_with(&row.expected[0]), "{row:?}");
    }
}
