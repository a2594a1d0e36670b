//! A cache to which several layers attend: each row of another layer's query sees what the row of
//! the owner's query sees, in chunks, steps, ragged calls and at positions on the device.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_cubecl::{AttentionOptions, Error, FakeQuantOptions, KvCache, KvMemory, On, Target};

use crate::{
    batch::batch_of,
    common::{
        CLOSE, Host, Rng, Setup, check_properties, chunk_sizes, close, sampled, sampled_count,
        setups, snapshot, stamp,
    },
    ragged::{ROUNDS, padded, rows_of},
};

stamp!(
    chunks_see_what_the_owner_sees,
    any_chunks_see_what_the_owner_sees,
    ragged_calls_see_what_the_owner_sees,
    positions_on_the_device,
    whole_sequences_share_keys_and_values,
    wrong_queries,
);

const NAMES: [&str; 7] = [
    "float",
    "k4v4-g16-r32",
    "k2v2-g16-r16-gflush",
    "k4v4-g16-r32-s3-after",
    "k16v4-g16-r16-s20",
    "k4v2-g16-r16-hadv",
    "kint8vint8-hadk",
];

/// Returns the text with the query of another layer, of twice as many heads.
fn of_other_layer(text: &Setup) -> Setup {
    let [batch, n_heads, tokens, head_dim] = text.query.shape;
    let mut rng = Rng::new(text.seed + 7000);
    let query = Host::normal(&mut rng, [batch, 2 * n_heads, tokens, head_dim]);
    Setup { query, ..text.clone() }
}

/// Attends with the owner's query, then with the same query and with another layer's, in calls of
/// these sizes. The same query gives the same bits, except that a kernel for several rows may add
/// in another order than a step.
#[track_caller]
fn check<T: Target>(on: &On<T>, text: &Setup, sizes: &[usize]) {
    let other = of_other_layer(text);
    let (mut cache, mut expected) = (text.cache(on), text.cache(on));
    let mut outputs = [vec![], vec![], vec![]];
    let mut start = 0;
    for &size in sizes {
        let [q, k, v] = text.tokens(start..start + size).on(on);
        let [theirs, ..] = other.tokens(start..start + size).on(on);
        let own =
            KvMemory::Cached(&mut cache).attend_and_share(q.clone(), k.clone(), v.clone(), None);
        let (own, shared) = own.unwrap_or_else(|error| panic!("{text:?}: {error}"));
        let again = KvMemory::Cached(&mut cache).attend_shared(q.clone(), &shared, None).unwrap();
        let theirs = KvMemory::Cached(&mut cache).attend_shared(theirs, &shared, None).unwrap();
        KvMemory::Cached(&mut cache).append_shared(shared).unwrap();
        expected.append(k, v).unwrap();
        start += size;
        assert_eq!(cache.lens(), expected.lens());
        for (outputs, attention) in outputs.iter_mut().zip([own, again, theirs]) {
            outputs.push(Host::of(attention.output));
        }
    }
    assert!(snapshot(&cache) == snapshot(&expected), "{text:?}: codes differ");
    let [own, again, theirs] = outputs.map(|parts| Host::cat(&parts));
    let oracle = text.reference().output;
    close(format!("{text:?}, the owner, {sizes:?}"), &own, &oracle, CLOSE);
    close(format!("{text:?}, the same query, {sizes:?}"), &again, &oracle, CLOSE);
    let oracle = other.reference().output;
    close(format!("{text:?}, another layer, {sizes:?}"), &theirs, &oracle, CLOSE);
    if T::NAME == "flex" {
        assert_eq!(own.data, again.data, "{text:?}, {sizes:?}");
    }
}

fn chunks_see_what_the_owner_sees<T: Target>(on: &On<T>) {
    for (seed, name) in sampled::<T, _>(NAMES.into_iter().enumerate()) {
        let text = Setup::new(name, [2, 4, 2, 90, 64], 900 + seed as u64);
        for sizes in [vec![90], vec![1; 90], vec![1, 40, 1, 17, 2, 29], vec![33, 1, 1, 55]] {
            check(on, &text, &sizes);
        }
        let config = text.config.with_sliding_window(Some(40)).with_sink_tokens(0);
        let window = Setup { config, ..text };
        check(on, &window, &[50, 1, 3, 20, 1, 15]);
    }
}

fn any_chunks_see_what_the_owner_sees<T: Target>(on: &On<T>) {
    check_properties(sampled_count::<T>(12), setups(), |text| {
        let sizes = chunk_sizes(&mut Rng::new(text.seed), text.len(), text.len().min(40));
        check(on, &text, &sizes);
    });
}

fn ragged_calls_see_what_the_owner_sees<T: Target>(on: &On<T>) {
    for (seed, name) in sampled::<T, _>(NAMES.into_iter().enumerate()) {
        let texts: Vec<Setup> = (0..4)
            .map(|i| Setup::new(name, [1, 4, 2, 60, 64], 950 + 10 * seed as u64 + i))
            .collect();
        let others: Vec<Setup> = texts.iter().map(of_other_layer).collect();
        let whole: Vec<Vec<f64>> = others.iter().map(|text| text.reference().output).collect();
        let (mut cache, mut expected) = (batch_of(&texts).cache(on), batch_of(&texts).cache(on));
        let mut lens = [0; 4];
        for (round, tokens) in ROUNDS.iter().enumerate() {
            let [q, k, v] = padded(&texts, &lens, tokens).on(on);
            let [theirs, ..] = padded(&others, &lens, tokens).on(on);
            expected.append_ragged(k.clone(), v.clone(), tokens).unwrap();
            let memory = KvMemory::Ragged(&mut cache, tokens);
            let (_, shared) = memory.attend_and_share(q, k, v, None).unwrap();
            let memory = KvMemory::Ragged(&mut cache, tokens);
            let attention = memory.attend_shared(theirs, &shared, None).unwrap();
            KvMemory::Ragged(&mut cache, tokens).append_shared(shared).unwrap();
            for (i, &n) in tokens.iter().enumerate() {
                let got = rows_of(&attention, i, n);
                let rows = whole[i].chunks(60 * 64);
                let oracle: Vec<f64> =
                    rows.flat_map(|head| &head[lens[i] * 64..][..n * 64]).copied().collect();
                close(format!("{name}, round {round}, {i}"), &got, &oracle, CLOSE);
                lens[i] += n;
            }
            assert_eq!(cache.lens(), lens);
        }
        assert!(snapshot(&cache) == snapshot(&expected), "{name}: codes differ");
    }
}

fn at(positions: &[i32], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(positions, (device, DType::I32))
}

fn positions_on_the_device<T: Target>(on: &On<T>) {
    for (seed, name) in sampled::<T, _>(NAMES.into_iter().enumerate()) {
        let text = Setup::new(name, [2, 4, 2, 60, 64], 980 + seed as u64);
        let other = of_other_layer(&text);
        let mut cache = text.cache(on);
        let mut outputs = vec![];
        for t in 0..60 {
            let position = at(&[t as i32], on);
            let [q, k, v] = text.tokens(t..t + 1).on(on);
            let [theirs, ..] = other.tokens(t..t + 1).on(on);
            let memory = KvMemory::At(&mut cache, &position);
            let (own, shared) = memory.attend_and_share(q.clone(), k, v, None).unwrap();
            let memory = KvMemory::At(&mut cache, &position);
            let again = memory.attend_shared(q, &shared, None).unwrap();
            assert_eq!(own.output.into_data(), again.output.into_data(), "{name} at {t}");
            let memory = KvMemory::At(&mut cache, &position);
            outputs.push(Host::of(memory.attend_shared(theirs, &shared, None).unwrap().output));
        }
        let oracle = other.reference().output;
        close(format!("{name} at positions"), &Host::cat(&outputs), &oracle, CLOSE);
        // A sequence below position 0 takes no part.
        let [theirs, ..] = other.tokens(59..60).on(on);
        let attention = cache.attend_last_at(theirs, &at(&[-1, 59], on)).unwrap();
        rows_of(&attention, 0, 0);
        rows_of(&attention, 1, 1);
    }
}

/// The closed form serves other layers as it serves the owner.
fn whole_sequences_share_keys_and_values<T: Target>(on: &On<T>) {
    let text = Setup::new("k4v4-g16-r32", [1, 4, 2, 70, 64], 990);
    let other = of_other_layer(&text);
    let memory = || {
        let (config, options) = (text.config, AttentionOptions::default());
        KvMemory::Parallel { config, fake_quant: FakeQuantOptions::default(), options }
    };
    let [q, k, v] = text.on(on);
    let (_, shared) = memory().attend_and_share(q, k, v, None).unwrap();
    let [theirs, ..] = other.on(on);
    let found = memory().attend_shared(theirs, &shared, None).unwrap();
    close("closed form", &Host::of(found.output), &other.reference().output, CLOSE);
    memory().append_shared(shared).unwrap();
}

fn wrong_queries<T: Target>(on: &On<T>) {
    let text = Setup::new("k4v4-g16-r16", [2, 4, 2, 30, 64], 995);
    let mut cache: KvCache = text.cache(on);
    let query = |shape: [usize; 4]| Tensor::<4>::zeros(shape, &**on);
    let unsupported = |cache: &KvCache| match cache.attend_last(query([2, 4, 1, 64])) {
        Err(Error::Unsupported { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert!(unsupported(&cache).contains("[0, 0] tokens"));
    let [q, k, v] = text.on(on);
    cache.attend_ragged(q, k, v, &[3, 5]).unwrap();
    assert!(unsupported(&cache).contains("[3, 5] tokens"));
    for shape in [[1, 4, 1, 64], [2, 3, 1, 64], [2, 4, 2, 64], [2, 4, 1, 32]] {
        let error = cache.attend_last(query(shape)).unwrap_err();
        assert!(matches!(error, Error::Shape { tensor: "query", .. }), "{error}");
    }
    for tokens in [&[1][..], &[1, 2], &[1, 1, 1]] {
        let error = cache.attend_last_ragged(query([2, 4, 1, 64]), tokens).unwrap_err();
        assert!(matches!(error, Error::Shape { tensor: "tokens", .. }), "{error}");
    }
    let error = cache.attend_last_at(query([2, 4, 1, 64]), &at(&[1, 2, 3], on)).unwrap_err();
    assert!(matches!(error, Error::Shape { tensor: "position", .. }), "{error}");
}
