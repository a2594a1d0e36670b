//! Windows and the held-out part of texts.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use kv_train::data::{DataError, Source, Windows};

use super::{World, all, message};

#[test]
fn every_token_is_predicted_once() {
    let world = World::new();
    for (n, seq_len) in [(17, 4), (16, 4), (20, 4), (2, 1), (100, 99), (100, 7), (65, 64)] {
        let tokens = world.tokens(n);
        let ids = all(&tokens);
        let windows = Windows::new(tokens, seq_len).unwrap();
        assert_eq!(windows.len(), (n - 1) / seq_len);
        let mut predicted = vec![];
        for i in 0..windows.len() {
            let window: Vec<u32> = windows.get(i).unwrap().collect();
            assert_eq!(window, ids[i * seq_len..=(i + 1) * seq_len]);
            predicted.extend_from_slice(&window[1..]);
        }
        assert_eq!(predicted, ids[1..=windows.len() * seq_len]);
        assert!(n - 1 - predicted.len() < seq_len);
        assert!(windows.get(windows.len()).is_none() && windows.get(usize::MAX).is_none());
    }
}

#[test]
fn short_texts_and_odd_splits_are_errors() {
    let world = World::new();
    let tokens = world.tokens(17);
    let short = Windows::new(tokens.clone(), 17);
    let rule = "tokens = 17: 1 window(s) with seq_len = 17 need at least 18";
    assert_eq!(message(short), format!("{rule}; use more text or a smaller seq_len"));
    message(Windows::new(tokens.clone(), usize::MAX));
    assert!(message(Windows::new(tokens.clone(), 0)).starts_with("seq_len = 0: "));
    let windows = Windows::new(tokens.clone(), 4).unwrap();
    for fraction in [0.0, 1.0, -0.5, 2.0, f64::NAN, f64::INFINITY, 0.9] {
        assert!(message(windows.hold_out(fraction)).starts_with("holdout = "), "{fraction}");
    }
    let one = Windows::new(tokens, 16).unwrap();
    assert!(matches!(one.hold_out(0.5), Err(DataError::TooShort { needed: 33, .. })));
}

#[test]
fn held_out_tokens_are_the_end_of_the_text() {
    let world = World::new();
    let tokens = world.tokens(1003);
    let windows = Windows::new(tokens.clone(), 10).unwrap();
    for (fraction, expected) in [(0.05, 5), (0.001, 1), (0.5, 50), (0.994, 99), (0.126, 13)] {
        let (train, valid) = windows.hold_out(fraction).unwrap();
        assert_eq!((train.len(), valid.len()), (100 - expected, expected));
        for i in 0..100_usize {
            let part = match i.checked_sub(train.len()) {
                None => train.get(i).unwrap().collect::<Vec<_>>(),
                Some(i) => valid.get(i).unwrap().collect(),
            };
            assert!(part.into_iter().eq(windows.get(i).unwrap()));
        }
        assert!(train.get(train.len()).is_none() && valid.get(valid.len()).is_none());
    }
    // A second split holds out the end of the first part.
    let (train, _) = windows.hold_out(0.1).unwrap();
    let (train, valid) = train.hold_out(0.5).unwrap();
    assert_eq!((train.len(), valid.len()), (45, 45));
    assert!(valid.get(44).unwrap().eq(windows.get(89).unwrap()));
}

#[test]
fn every_text_holds_out_its_own_tail() {
    let world = World::new();
    // Ids are bytes, and each text has its own letter.
    let lengths = [500, 301, 3, 812];
    let texts = ["a", "b", "c", "d"].map(|letter| (letter, letter.as_bytes()[0]));
    let paths: Vec<PathBuf> = texts
        .iter()
        .zip(lengths)
        .map(|((letter, _), n)| world.write(&format!("{letter}.txt"), letter.repeat(n)))
        .collect();
    let tokens = Arc::new(world.open(&Source::new(paths)).unwrap());
    let ends: Vec<usize> = tokens.sources().map(|source| source.end).collect();
    // A separator precedes each text except the first.
    assert_eq!(ends, [500, 802, 806, 1619]);
    let count = |ids: &[u32], letter: u8| ids.iter().filter(|&&id| id == u32::from(letter)).count();

    let windows = Windows::new(tokens.clone(), 10).unwrap();
    for fraction in [0.001, 0.1, 0.5] {
        let (train, valid) = windows.hold_out(fraction).unwrap();
        let part = |part: &Windows| -> Vec<Vec<u32>> {
            (0..part.len()).map(|i| part.get(i).unwrap().collect()).collect()
        };
        let (trained, held_out) = (part(&train), part(&valid));
        // 49, 30 and 80 windows lie within one text; the text of three tokens has none.
        for (&(letter, byte), whole) in texts.iter().zip([49.0f64, 30.0, 0.0, 80.0]) {
            let expected =
                if whole == 0.0 { 0 } else { ((whole * fraction).round() as usize).max(1) };
            let own = held_out.iter().filter(|ids| count(ids, byte) == ids.len()).count();
            assert_eq!(own, expected, "{letter} at {fraction}");
        }
        // The first held-out window of every text comes first.
        let first: Vec<u32> = held_out.iter().take(3).map(|ids| ids[5]).collect();
        assert_eq!(first, [97, 98, 100]);
        // The window in which one text ends and the next begins is in neither part.
        assert!(trained.len() + held_out.len() >= windows.len() - 3);
        let text = valid.text(usize::MAX);
        assert!(text.len() > 10 * held_out.len());
        assert_eq!(valid.text(30).len(), 30);
        for (_, byte) in [texts[0], texts[1], texts[3]] {
            assert_eq!(count(&valid.text(30), byte), 10);
        }
    }

    // No scored id is trained on. In these texts, no character occurs twice, so ids identify their
    // position.
    let distinct: Vec<PathBuf> = (0..3)
        .map(|text| {
            let chars = (0..400u32).map(|i| char::from_u32(0x4e00 + 400 * text + i).unwrap());
            world.write(&format!("distinct {text}.txt"), chars.collect::<String>())
        })
        .collect();
    let tokens = Arc::new(world.open(&Source::new(distinct)).unwrap());
    let windows = Windows::new(tokens.clone(), 7).unwrap();
    let (train, valid) = windows.hold_out(0.2).unwrap();
    let at = |windows: &Windows, i: usize| windows.get(i).unwrap().collect::<Vec<u32>>();
    let position = |ids: &[u32]| {
        // Each character takes three bytes and is unique.
        (0..=tokens.len() - ids.len())
            .find(|&p| tokens.ids(p..p + ids.len()).eq(ids.iter().copied()))
            .unwrap()
    };
    let positions = |windows: &Windows| -> Vec<usize> {
        (0..windows.len()).map(|i| position(&at(windows, i))).collect()
    };
    let trained: BTreeSet<usize> =
        positions(&train).into_iter().flat_map(|start| start..start + 8).collect();
    for start in positions(&valid) {
        for target in start + 1..start + 8 {
            assert!(!trained.contains(&target), "{target}");
        }
    }

    // Not each of a hundred small texts holds out a window, which would be a third of the text.
    let small: Vec<PathBuf> =
        (0..100).map(|i| world.write(&format!("small {i}.txt"), "x".repeat(35))).collect();
    let tokens = Arc::new(world.open(&Source::new(small)).unwrap());
    let windows = Windows::new(tokens, 10).unwrap();
    let (train, valid) = windows.hold_out(0.02).unwrap();
    assert!((5..=9).contains(&valid.len()), "{}", valid.len());
    assert!(train.len() + 2 * valid.len() >= windows.len());
}
