//! What attention returns beside its output, and the options it takes.

use burn::tensor::{DType, Int, Tensor};
use kv_cubecl::{
    Attention, AttentionOptions, FakeQuantOptions, KvMemory, On, Target,
    reference::{RowOptions, StreamOracle, attend_row_with},
    streaming_attention, streaming_attention_with, streaming_attention_with_sinks,
};

use crate::common::{CLOSE, Host, Setup, close, equal_bits, sampled, skipped, snapshot, stamp};

stamp!(
    log_sum_exps_are_those_of_the_scores,
    scores_are_scaled_as_asked,
    keys_and_values_of_different_width,
    scales_without_meaning_are_refused,
    windows_hide_older_tokens,
    scores_are_bounded,
    sinks_join_the_denominator,
    sinks_that_do_not_fit_are_refused,
    narrow_inputs,
);

/// Output and log-sum-exp of every row in f64, over what the oracle's cache shows it, with the
/// options of each query head.
fn expected(text: &Setup, options: &dyn Fn(usize) -> RowOptions) -> [Vec<f64>; 2] {
    let [batch, n_heads, tokens, head_dim] = text.query.shape;
    let n_rep = n_heads / text.key.shape[1];
    let mut oracle = StreamOracle::new(&text.config, text.shape());
    let value_dim = text.value.shape[3];
    let mut output = vec![0.0; text.output_shape().iter().product()];
    let mut lse = vec![0.0; batch * n_heads * tokens];
    for t in 0..tokens {
        let Setup { query, key, value, .. } = text.tokens(t..t + 1);
        oracle.step_with(&key.data, &value.data, |lanes| {
            for (slice, query) in query.data.chunks(head_dim).enumerate() {
                let lane = &lanes[slice / n_rep];
                let seen = lane.seen(&text.config);
                let (keys, values) = (lane.keys(&seen), lane.values(&seen));
                let query: Vec<f64> = query.iter().map(|&x| f64::from(x)).collect();
                let attention = attend_row_with(&query, &keys, &values, options(slice % n_heads));
                let row = slice * tokens + t;
                lse[row] = attention.lse;
                output[row * value_dim..][..value_dim].copy_from_slice(&attention.output);
            }
        });
    }
    [output, lse]
}

/// All ways to attend to a text: token by token, at positions on the device, in chunks, looking
/// ahead, and in parallel.
fn check<T: Target>(on: &On<T>, text: &Setup, options: AttentionOptions) {
    check_with_sinks(on, text, options, None);
}

fn check_with_sinks<T: Target>(
    on: &On<T>,
    text: &Setup,
    options: AttentionOptions,
    sinks: Option<&[f32]>,
) {
    let [output, lse] = expected(text, &|head| RowOptions {
        scale: options.scale.map(f64::from),
        softcap: options.softcap.map(f64::from),
        sink: sinks.map(|sinks| f64::from(sinks[head])),
    });
    let logits = || sinks.map(|sinks| Tensor::<1>::from_floats(sinks, on));
    let what = |how: &str| format!("{text:?} {options:?} {how}");
    let check_parts = |how: &str, parts: Vec<Attention>| {
        let of = |part: fn(&Attention) -> Tensor<4>| {
            Host::cat(&parts.iter().map(|attention| Host::of(part(attention))).collect::<Vec<_>>())
        };
        close(what(how), &of(|part| part.output.clone()), &output, CLOSE);
        let lses = of(|part| part.lse.clone().unsqueeze_dim(3));
        // Sums of some hundred weights, and scores that are sums of head_dim products, in f32.
        close(what(&format!("{how}, log-sum-exp")), &lses, &lse, CLOSE);
    };
    let cache = || text.cache(on).with_options(options).unwrap();
    let part = |range: core::ops::Range<usize>| text.tokens(range).on(on);
    let tokens = text.len();

    let mut streaming = cache();
    let steps = (0..tokens).map(|t| {
        let [q, k, v] = part(t..t + 1);
        KvMemory::Cached(&mut streaming).attend_with_sinks(q, k, v, logits()).unwrap()
    });
    check_parts("token by token", steps.collect());

    let mut stepping = cache();
    let steps = (0..tokens).map(|t| {
        let [q, k, v] = part(t..t + 1);
        let position = Tensor::<1, Int>::from_data([t as i32], (&**on, DType::I32));
        let memory = KvMemory::At(&mut stepping, &position);
        memory.attend_with_sinks(q, k, v, logits()).unwrap()
    });
    check_parts("at positions", steps.collect());

    // Few rows, many rows, and what is left.
    let bounds = [0, tokens / 3, tokens / 3 + 2, tokens];
    let mut chunked = cache();
    let chunks = bounds.windows(2).map(|bounds| {
        let [q, k, v] = part(bounds[0]..bounds[1]);
        let with_sinks = |attention: Attention| match logits() {
            Some(logits) => attention.with_sinks(logits).unwrap(),
            None => attention,
        };
        let ahead = chunked.peek(q.clone(), k.clone(), v.clone()).unwrap();
        let attention = chunked.attend(q, k, v).unwrap();
        (with_sinks(ahead), with_sinks(attention))
    });
    let (ahead, chunks): (Vec<_>, Vec<_>) = chunks.unzip();
    check_parts("in chunks", chunks);
    check_parts("looking ahead", ahead);

    let [q, k, v] = text.on(on);
    let (config, fake_quant) = (text.config, FakeQuantOptions::default());
    let memory = KvMemory::Parallel { config, fake_quant, options };
    let parallel = memory.attend_with_sinks(q, k, v, logits()).unwrap();
    check_parts("in parallel", vec![parallel]);
}

const NAMES: [&str; 6] = [
    "k2v2-g16-r32-s1-hadv",
    "float",
    "k4v4-g16-r16",
    "k2v2-g16-r16-s3-after",
    "k8v16-g16-r32-s2",
    "k2v2-g16-r48-s1-gflush",
];

fn log_sum_exps_are_those_of_the_scores<T: Target>(on: &On<T>) {
    for (seed, name) in sampled::<T, _>(NAMES).into_iter().enumerate() {
        let text = Setup::new(name, [2, 4, 2, 75, 64], seed as u64);
        check(on, &text, AttentionOptions::default());
    }
}

fn scores_are_scaled_as_asked<T: Target>(on: &On<T>) {
    for (seed, name) in sampled::<T, _>(NAMES).into_iter().enumerate() {
        let text = Setup::new(name, [1, 3, 1, 70, 64], 10 + seed as u64);
        // A power of two, so that f32 and f64 have the same.
        check(on, &text, AttentionOptions::default().with_scale(0.0625));
    }
}

/// Keys of one width and values of another: both are cut into groups as wide as they are.
fn keys_and_values_of_different_width<T: Target>(on: &On<T>) {
    let names = ["float", "k4v4-g16-r16", "k2v2-g16-r16-s3-after", "k8v16-g16-r32-s2", "k16v2-g16"];
    // Wider keys (as in DeepSeek's latent attention), wider values, and widths without a common
    // vector.
    for (seed, (key_dim, value_dim)) in [(96, 64), (32, 80), (18, 48)].into_iter().enumerate() {
        for name in sampled::<T, _>(names) {
            let text = Setup::new(name, [2, 4, 2, 75, key_dim], 50 + seed as u64);
            let text = text.with_value_dim(value_dim);
            check(on, &text, AttentionOptions::default());
        }
    }
    for (key_dim, value_dim) in [(128, 64), (32, 128)] {
        let text = Setup::new("kint8vint8-hadk-hadv", [2, 4, 2, 75, key_dim], 59);
        check(on, &text.with_value_dim(value_dim), AttentionOptions::default());
    }
}

/// Windows that hide more than a group and less, that begin within a group and between two, with
/// rings that are written over several times, with and without sinks, on either side in float.
fn windows_hide_older_tokens<T: Target>(on: &On<T>) {
    let names = [
        "float-w1",
        "float-w24",
        "float-s3-w20",
        "k2v2-g16-r16-w16",
        "k4v4-g16-r16-w24",
        "k2v2-g16-r32-s3-w40",
        "k2v2-g16-r32-s1-w33-after",
        "k4v2-g16-r32-s2-w37-gflush-hadv",
        "k8v16-g16-r32-s2-w50",
        "k16v4-g16-r16-w29",
        "k2v2-g16-r16-w500",
    ];
    for (seed, name) in sampled::<T, _>(names).into_iter().enumerate() {
        let text = Setup::new(name, [2, 4, 2, 131, 64], 60 + seed as u64);
        check(on, &text, AttentionOptions::default());
    }
    // Units that read one channel at a time, and query heads enough for many rows of one token.
    check(
        on,
        &Setup::new("k4v4-g8-r16-s1-w19", [1, 2, 1, 70, 40], 75),
        AttentionOptions::default(),
    );
    check(on, &Setup::new("k4v4-g16-r16-w24", [1, 20, 1, 70, 64], 76), AttentionOptions::default());
}

/// Bounds near the scores' size, beyond it, and so low that all weights are nearly equal.
fn scores_are_bounded<T: Target>(on: &On<T>) {
    for (seed, (name, softcap)) in
        NAMES.into_iter().zip([1.0, 30.0, 0.01, 2.0, 5.0, 0.5]).enumerate()
    {
        let text = Setup::new(name, [1, 4, 2, 75, 64], 20 + seed as u64);
        check(on, &text, AttentionOptions::default().with_softcap(softcap));
    }
    let text = Setup::new("k2v2-g16-r16-w24", [1, 12, 1, 75, 64], 28);
    check(on, &text, AttentionOptions::default().with_softcap(2.0).with_scale(0.5));
}

/// Sinks far below all scores, among them, and above them.
fn sinks_join_the_denominator<T: Target>(on: &On<T>) {
    for (seed, name) in NAMES.into_iter().chain(["k2v2-g16-r16-s1-w30"]).enumerate() {
        let text = Setup::new(name, [2, 4, 2, 75, 64], 40 + seed as u64);
        check_with_sinks(on, &text, AttentionOptions::default(), Some(&[-30.0, 0.0, 2.5, 9.0]));
    }
}

fn sinks_that_do_not_fit_are_refused<T: Target>(on: &On<T>) {
    let text = Setup::new("float", [1, 4, 2, 3, 64], 3);
    let logits = || Tensor::<1>::zeros([2], &**on);
    let [q, k, v] = text.on(on);
    let attention = text.cache(on).attend(q.clone(), k.clone(), v.clone()).unwrap();
    let (fake_quant, options) = (FakeQuantOptions::default(), AttentionOptions::default());
    let errors = [
        attention.with_sinks(logits()).unwrap_err(),
        streaming_attention_with_sinks(q, k, v, logits(), &text.config, fake_quant, options)
            .unwrap_err(),
    ];
    for error in errors.map(|error| error.to_string()) {
        assert!(error.contains("sink_logits") && error.contains("4 query heads"), "{error}");
    }
}

fn scales_without_meaning_are_refused<T: Target>(on: &On<T>) {
    let text = Setup::new("k4v4", [1, 1, 1, 4, 64], 3);
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let options = AttentionOptions::default().with_scale(scale);
        let expected = format!("scale {scale}: must be finite and above 0");
        let error = text.cache(on).with_options(options).unwrap_err().to_string();
        assert!(error.contains(&expected), "{error}");
        let [q, k, v] = text.on(on);
        let fake_quant = FakeQuantOptions::default();
        let error = streaming_attention_with(q, k, v, &text.config, fake_quant, options);
        assert!(error.unwrap_err().to_string().contains(&expected));
    }
    let options = AttentionOptions::default().with_softcap(0.0);
    let error = text.cache(on).with_options(options).unwrap_err().to_string();
    assert!(error.contains("softcap 0: must be finite and above 0"), "{error}");
}

/// Queries, keys and values that are narrow: the same numbers as in f32, in which all is computed,
/// and the output rounded to their type.
fn narrow_inputs<T: Target>(on: &On<T>) {
    for dtype in [DType::F16, DType::BF16] {
        if !on.supports_dtype(dtype) {
            skipped(&format!("the device has no {dtype:?}"));
            continue;
        }
        for (seed, name) in NAMES.into_iter().enumerate() {
            let text = Setup::new(name, [2, 4, 2, 60, 64], 30 + seed as u64);
            let narrow = |x: Tensor<4>| x.cast(dtype);
            let wide = |x: Tensor<4>| x.cast(dtype).cast(DType::F32);
            let sizes = [1usize, 20, 1, 1, 30, 1, 6];
            let (mut narrow_cache, mut wide_cache) = (text.cache(on), text.cache(on));
            let mut start = 0;
            let check = |what: &str, got: Attention, want: Attention| {
                let what = format!("{text:?} {dtype:?} {what}");
                assert_eq!(got.output.dtype(), dtype, "{what}");
                let want_rounded = Host::of(wide(want.output));
                equal_bits(&what, &Host::of(got.output.cast(DType::F32)).data, &want_rounded.data);
                assert_eq!(got.lse.dtype(), DType::F32, "{what}");
                let [got, want] = [got.lse, want.lse].map(|lse| Host::of(lse.unsqueeze_dim(3)));
                equal_bits(format!("{what}, log-sum-exp"), &got.data, &want.data);
            };
            for size in sizes {
                let part = || text.tokens(start..start + size).on(on);
                let [q, k, v] = part().map(narrow);
                let [wide_q, wide_k, wide_v] = part().map(wide);
                let got = narrow_cache.attend(q, k, v).unwrap();
                let want = wide_cache.attend(wide_q, wide_k, wide_v).unwrap();
                check(&format!("{size} from {start}"), got, want);
                start += size;
            }
            assert!(snapshot(&narrow_cache) == snapshot(&wide_cache), "{text:?} {dtype:?}");
            let [q, k, v] = text.on(on).map(narrow);
            let [wide_q, wide_k, wide_v] = text.on(on).map(wide);
            let got = streaming_attention(q, k, v, &text.config).unwrap();
            let want = streaming_attention(wide_q, wide_k, wide_v, &text.config).unwrap();
            check("in parallel", got, want);
        }
    }
}
