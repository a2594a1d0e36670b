//! Known bugs of other implementations of DeepSeek-V4, with a test for each that concerns a model.
//! `docs/decisions/caches.md` lists all and their tests.

use kv_models::{
    Checkpoints, PromptCache, SavedCache, ids_to_tensor, kv_cubecl::sparse::SparseCounters,
};

use crate::common::{
    deepseek::{Golden, host},
    device,
    saved::{bits, config},
};

/// Known bug: overlap lost in decode. An entry depends on the tokens of the window before its own,
/// also if those were prefilled.
#[test]
fn overlap_is_not_lost_in_decode() {
    let golden = Golden::tiny();
    for prefilled in 33..=44 {
        let mut cache = golden.cache("float", 80, 1);
        golden.pass(&mut cache, 0, prefilled);
        // The indexer selects 6 of the entries, and each of the next windows is among the newest.
        for t in prefilled..prefilled + 12 {
            let logits = golden.pass(&mut cache, 0, 1);
            golden.check(0, t, &logits, format!("{t} after {prefilled}"));
        }
    }
}

/// Known bug: wrong logits for one token with a cache. One token is a query like any other, also as
/// the first, and also where it completes a window.
#[test]
fn one_token_with_a_cache_has_right_logits() {
    let golden = Golden::tiny();
    for len in (0..=40).chain([63, 64, 95, 96, 127, 128]) {
        let mut cache = golden.cache("float", 140, 1);
        if len > 0 {
            golden.pass(&mut cache, 1, len);
        }
        let (mut other, first) = (cache.clone(), golden.pass(&mut cache.clone(), 1, 1));
        golden.check(1, len, &first, format!("1 after {len}"));
        let both = golden.pass(&mut other, 1, 2);
        golden.check(1, len, &both, format!("2 after {len}"));
    }
}

/// Known bug: indexer keys not kept across prefill chunks, so that each chunk selects among its own
/// entries only.
#[test]
fn indexer_keys_are_kept_across_prefill_chunks() {
    let golden = Golden::tiny();
    let seq = 120;
    let mut selected: Option<Vec<u64>> = None;
    for chunk in [1, 2, 3, 5, 7, 16, 31, 64, 120] {
        let mut cache = golden.cache("float", seq, 1);
        while cache.len() < seq {
            let (start, n) = (cache.len(), chunk.min(seq - cache.len()));
            let logits = golden.pass(&mut cache, 0, n);
            golden.check(0, start, &logits, format!("{n} after {start}"));
        }
        let layers = cache.layers().iter().map(|layer| layer.sparse().unwrap().counters());
        let counts: Vec<u64> = layers.map(|SparseCounters { selected, .. }| selected).collect();
        assert!(counts[1] > 0 && counts[3] == counts[1] && counts[2] == 0, "{counts:?}");
        assert_eq!(*selected.get_or_insert(counts.clone()), counts, "chunks of {chunk}");
    }
}

/// Known bug: a reused prefix reads a stale window, or the open windows of the longer text.
#[test]
fn a_reused_prefix_reads_no_stale_window() {
    let (golden, device) = (Golden::tiny(), device());
    for (longer, shared, chunk) in [(100, 40, 7), (90, 70, 13), (120, 97, 32), (60, 9, 4)] {
        let cache = golden.cache("float", 160, 1);
        let mut held = PromptCache::new(cache, Checkpoints::All).unwrap();
        let mut first = golden.texts[1][..longer].to_vec();
        first[..shared].copy_from_slice(&golden.texts[0][..shared]);
        held.prefill(&golden.model, &first, chunk, &device, || true).unwrap();
        let second = &golden.texts[0][..shared + 30];
        let reused = held.reuse(second).unwrap();
        assert!(reused <= shared && reused == held.cache().len());
        let logits = held.prefill(&golden.model, second, chunk, &device, || true).unwrap();
        let what = format!("{shared} of {longer} tokens shared, {reused} reused");
        golden.check(0, second.len() - 1, &host(logits.unwrap()), what);
    }
}

/// Known bug: save and restore leads to other logits, depending on the offset modulo the ratio.
#[test]
fn saved_and_restored_caches_have_the_same_logits_at_any_offset() {
    let (golden, device) = (Golden::tiny(), device());
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("prefix.safetensors");
    for name in ["float", "k4v4", "float-f16", "kint8ve4m3b"] {
        let all = golden.one_by_one(name, 0, 140);
        let mut cache = golden.cache(name, 150, 1);
        let few = name != "float";
        for offset in 0..=129 {
            let near = [0, 1, 63].contains(&(offset % 64)) || offset % 32 == 31;
            if near || if few { offset == 34 } else { offset <= 40 } {
                let text = &golden.texts[0][..offset];
                cache.save(&path, &golden.model, "tiny", &[text]).unwrap();
                let saved = SavedCache::open(&path).unwrap();
                let capacity = if offset % 2 == 0 { 140 } else { 200 };
                let restored = saved.restore(&golden.model, config(name, capacity), &device);
                let mut restored = restored.unwrap();
                let bytes = golden.cache(name, capacity, 1).memory_bytes().total();
                assert_eq!(restored.memory_bytes().total(), bytes);
                for (t, wanted) in all.iter().enumerate().skip(offset).take(9) {
                    let logits = golden.pass(&mut restored, 0, 1);
                    assert_eq!(bits(&logits), bits(wanted), "{name}: {t} from {offset}");
                }
            }
            golden.pass(&mut cache, 0, 1);
        }
    }
}

/// Known bug: padding reaches the first entry in ragged batches.
#[test]
fn padding_does_not_reach_the_first_entry_in_ragged_batches() {
    let (golden, device) = (Golden::tiny(), device());
    let logits = [0, 7, 255].map(|padding| {
        let mut cache = golden.cache("float", 40, 2);
        let mut rows = vec![];
        // The first sequence completes its first window of 4 tokens in the second call.
        for tokens in [[3, 8], [2, 8], [8, 1], [1, 0]] {
            let lens = cache.lens().to_vec();
            let ids = (0..2).flat_map(|i| {
                let own = golden.texts[i][lens[i]..lens[i] + tokens[i]].to_vec();
                own.into_iter().chain(vec![padding; 8 - tokens[i]])
            });
            let ids = ids_to_tensor(&ids.collect::<Vec<_>>(), [2, 8], &device);
            let logits = golden.model.step_ragged(ids, &tokens, &mut cache).unwrap();
            for i in (0..2).filter(|&i| tokens[i] > 0) {
                let own = logits.clone().narrow(0, i, 1).narrow(1, 0, tokens[i]);
                let own = host(own);
                golden.check(i, lens[i], &own, format!("{tokens:?} of {i} after {lens:?}"));
                rows.push(own);
            }
        }
        bits(&rows.concat())
    });
    assert!(logits[0] == logits[1] && logits[1] == logits[2]);
}

/// Known bug: a prefix cache finds nothing for prompts below 4096 tokens, the least common multiple
/// of its groups' blocks. Here whatever the windows still hold is reused, at most a window of 32
/// tokens less than is shared.
#[test]
fn prefixes_of_short_prompts_are_reused() {
    let (golden, device) = (Golden::tiny(), device());
    for shared in [1, 5, 17, 40, 64, 100, 150] {
        let cache = golden.cache("float", 200, 1);
        let mut held = PromptCache::new(cache, Checkpoints::All).unwrap();
        let first = &golden.texts[0][..shared];
        held.prefill(&golden.model, first, 16, &device, || true).unwrap();
        let second = &golden.texts[0][..shared + 20];
        assert_eq!(held.reuse(second).unwrap(), shared);
        let logits = held.prefill(&golden.model, second, 16, &device, || true).unwrap();
        golden.check(0, shared + 19, &host(logits.unwrap()), format!("{shared} tokens reused"));
    }
}

/// Known bug: a quantized cache switches from selected entries to all of them. Every call of a
/// layer with an indexer attends to selected entries, as many as in float.
#[test]
fn quantized_caches_do_not_switch_to_dense_attention() {
    let golden = Golden::tiny();
    let sizes = [33, 1, 1, 30, 1, 64, 1, 1];
    let counters = |name: &str| {
        let mut cache = golden.cache(name, 140, 1);
        sizes.iter().for_each(|&n| drop(golden.pass(&mut cache, 0, n)));
        let layers = cache.layers().iter().map(|layer| layer.sparse().unwrap().counters());
        layers.collect::<Vec<_>>()
    };
    let float = counters("float");
    let indexed: Vec<_> = float.iter().filter(|counters| counters.sparse_calls > 0).collect();
    assert!(!indexed.is_empty() && indexed.len() < float.len(), "{float:?}");
    for counters in &indexed {
        assert_eq!((counters.sparse_calls, counters.dense_calls), (sizes.len() as u64, 0));
        assert!(counters.selected > 0);
    }
    for name in ["k2v2", "k4v4", "kint8ve4m3b", "float-bf16"] {
        assert_eq!(counters(name), float, "{name}");
    }
}
