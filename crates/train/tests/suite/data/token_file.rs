//! The token cache: reuse, damage, full disks.

use std::{fs, path::PathBuf};

use kv_models::Tokenizer;
use kv_train::data::{DataError, Origin, Source, TokenFile};

use super::{EOS, World, all, message, random, rebuilt, write_tokenizer};

#[test]
fn a_cache_follows_its_sources_and_its_tokenizer() {
    let world = World::new();
    let source = Source::new([world.write("a.txt", "the one"), world.write("b.jsonl", "")]);
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Built);
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Reused);

    // The text changes, but its length and its time stamp do not.
    let old = world.open(&source).unwrap();
    let modified = fs::metadata(&source.paths()[0]).unwrap().modified().unwrap();
    world.write("a.txt", "the two");
    let file = fs::File::options().write(true).open(&source.paths()[0]).unwrap();
    file.set_modified(modified).unwrap();
    let new = world.open(&source).unwrap();
    assert!(rebuilt(&new).contains("changed"));
    assert_eq!(all(&new), world.joined(&["the two"]));
    assert_eq!(all(&old), world.joined(&["the one"]), "a file in use changed");
    assert_eq!(world.n_cached(), 1);

    world.write("b.jsonl", "{\"text\": \"more\", \"body\": \"else\"}");
    assert_eq!(all(&world.open(&source).unwrap()), world.joined(&["the two", "more"]));
    let body = source.clone().with_field("body");
    assert_eq!(all(&world.open(&body).unwrap()), world.joined(&["the two", "else"]));
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Reused);
    assert_eq!(world.n_cached(), 2);

    // The tokenizer has the same number of tokens, but other merges.
    let path = world.path("tokenizer.json");
    write_tokenizer(&path, &[("t", "h"), ("th", "e"), ("t", "w")]);
    let tokenizer = Tokenizer::from_file(&path, &[EOS]).unwrap();
    let open = |tokenizer| TokenFile::open(&source, tokenizer, &path, &world.cache()).unwrap();
    let new = open(&tokenizer);
    rebuilt(&new);
    assert_ne!(tokenizer.encode("the two").unwrap(), world.tokenizer.encode("the two").unwrap());
    let documents = ["the two", "more"].map(|text| tokenizer.encode(text).unwrap());
    assert_eq!(all(&new), documents.join(&EOS));
    // The tokenizer's file is the same, but the end-of-text id differs.
    rebuilt(&open(&Tokenizer::from_file(&path, &[10]).unwrap()));
}

#[test]
fn bytes_moved_between_sources_are_detected() {
    let world = World::new();
    let source = Source::new([world.write("a.txt", "the one"), world.write("b.txt", "and two")]);
    world.open(&source).unwrap();
    world.write("a.txt", "the on");
    world.write("b.txt", "eand two");
    rebuilt(&world.open(&source).unwrap());
}

#[test]
fn a_damaged_cache_is_rebuilt() {
    let world = World::new();
    let text = "all the words of the text ".repeat(40);
    let source = Source::new([world.write("a.txt", &text)]);
    let expected = world.joined(&[&text]);
    let path = world.open(&source).unwrap().path().to_path_buf();
    let good = fs::read(&path).unwrap();
    assert_eq!(good.len(), 56 + 8 + 2 * expected.len());

    let check = |bytes: &[u8], what: &str| {
        fs::write(&path, bytes).unwrap();
        let tokens = world.open(&source).unwrap();
        assert!(!rebuilt(&tokens).is_empty(), "{what}");
        assert!(all(&tokens) == expected, "{what}");
        assert!(fs::read(&path).unwrap() == good, "{what}");
        assert_eq!(world.n_cached(), 1, "{what}");
    };
    let mut state = 1;
    for at in 0..56 {
        for mask in [0x80, 1 + random(&mut state) as u8 % 255] {
            let mut bytes = good.clone();
            bytes[at] ^= mask;
            check(&bytes, &format!("byte {at} of the header ^ {mask}"));
        }
    }
    for _ in 0..200 {
        let at = 56 + random(&mut state) as usize % (good.len() - 56);
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (random(&mut state) % 8);
        check(&bytes, &format!("byte {at}"));
    }
    for len in (0..=66).chain([good.len() / 2, good.len() - 2, good.len() - 1]) {
        check(&good[..len], &format!("{len} bytes"));
    }
    check(&[&good[..], &[0, 0]].concat(), "longer");
    check(&vec![0; good.len()], "zeros");
    check(b"something else entirely, which is longer than a header of 56 bytes", "foreign");
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Reused);
}

#[test]
fn a_cache_that_cannot_be_written_is_an_error() {
    let world = World::new();
    let source = Source::new([world.write("a.txt", "the text")]);
    let file = world.write("file", "in the way");
    for cache in [file.clone(), file.join("below")] {
        let failed =
            TokenFile::open(&source, &world.tokenizer, &world.path("tokenizer.json"), &cache);
        let message = message(failed);
        assert!(message.contains("cannot write the token cache"), "{message}");
        assert!(message.ends_with("free space or name another cache folder"), "{message}");
    }
    assert_eq!(fs::read(file).unwrap(), b"in the way");

    // A folder is in the place of the file.
    let path = world.open(&source).unwrap().path().to_path_buf();
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(world.open(&source), Err(DataError::Cache { .. })));
    assert_eq!(world.n_cached(), 1);
}

/// A limit on the size of files makes writes fail as on a full disk.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_nothing() {
    const FOLDER: &str = "KV_TRAIN_TEST_FULL_DISK";
    if let Some(folder) = std::env::var_os(FOLDER) {
        let folder = PathBuf::from(folder);
        let path = folder.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path, &[EOS]).unwrap();
        let source = Source::new([folder.join("a.txt")]);
        let failed = TokenFile::open(&source, &tokenizer, &path, &folder.join("cache/ids"));
        assert!(matches!(failed, Err(DataError::Cache { .. })), "{failed:?}");
        return;
    }
    let world = World::new();
    let source = Source::new([world.write("a.txt", "0123456789\n".repeat(300_000))]);
    let status = std::process::Command::new("sh")
        .arg("-c")
        // The signal is ignored, because it would end the process before the error. Blocks have 512
        // or 1024 bytes.
        .arg("trap '' XFSZ; ulimit -f 2000; exec \"$0\" --exact \"$1\"")
        .arg(std::env::current_exe().unwrap())
        .arg("data::token_file::a_full_disk_leaves_nothing")
        .env(FOLDER, world.folder.path())
        .output()
        .unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
    assert!(world.cache().is_dir(), "the child did not run");
    assert_eq!(world.n_cached(), 0);
    assert_eq!(world.open(&source).unwrap().origin(), &Origin::Built);
}

#[test]
fn processes_may_share_a_cache() {
    let world = World::new();
    let text = "some of the text ".repeat(20_000);
    let source = Source::new([world.write("a.txt", &text)]);
    let expected = world.joined(&[&text]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!(all(&world.open(&source).unwrap()) == expected));
        }
    });
    assert_eq!(world.n_cached(), 1);
}
