//! Scales that are taken from frames: what is stored of them, and how they follow one another.

use burn::tensor::{Tensor, TensorData};
use half::f16;
use kv_cubecl::{
    CacheShape, FrameCache, FrameConfig, Frames, KvCache, KvCacheConfig, KvFormat, Logical, On,
    Packed, RunningScale, Side, Sides, Target, quantize_side, reference,
};

use crate::common::{Host, Rng, equal_bits, stamp};

stamp!(
    a_frame_has_one_scale_for_each_head,
    scales_follow_frames,
    any_settings_and_frames,
    settings_are_parsed,
    the_newest_frame_again_is_as_if_it_had_come_once,
    what_is_no_number_leaves_scales_finite,
    what_has_no_frames_is_refused,
);

const HEAD_DIM: usize = 16;
const TOKENS: usize = 6;

/// A rule whose parts all matter within few frames.
fn rule() -> RunningScale {
    let mut rule = RunningScale::default();
    (rule.momentum, rule.warm_up, rule.growth) = (0.75, Frames(3), 1.25);
    (rule.floor, rule.percentile) = (1.6, 90.0);
    rule
}

/// Another rule for the values, with a ceiling.
fn rules() -> Sides<RunningScale> {
    let mut values = rule();
    (values.momentum, values.warm_up, values.growth) = (0.5, Frames(2), 2.0);
    (values.floor, values.ceiling) = (0.7, 15.0);
    Sides { keys: rule(), values }
}

fn cache<T: Target>(
    on: &On<T>,
    name: &str,
    rule: impl Into<Sides<RunningScale>>,
    heads: usize,
) -> FrameCache {
    let format: KvCacheConfig = name.parse().unwrap();
    let config = FrameConfig::new(format, TOKENS, Frames(4)).with_running(rule);
    FrameCache::new(&config, CacheShape::new(1, heads, HEAD_DIM), on).unwrap()
}

fn frame(rng: &mut Rng, heads: usize, size: f32) -> Host {
    let mut host = Host::normal(rng, [1, heads, TOKENS, HEAD_DIM]);
    host.data.iter_mut().for_each(|x| *x *= size);
    host
}

/// The scales of the tokens of a frame, by head.
fn scales(packed: &Packed) -> Vec<Vec<f32>> {
    let Logical { scale, .. } = packed.to_logical();
    scale.chunks(TOKENS).map(|head| head.iter().map(|scale| scale.to_f32()).collect()).collect()
}

/// Asserts that the newest frame of a side restores to what the oracle makes of it, with these
/// running amaxes by head.
#[track_caller]
fn check(what: &str, cache: &FrameCache, side: Side, host: &Host, amax: &[f32]) {
    let newest = cache.newest(side).expect("a frame that is quantized");
    for (head, (scales, &amax)) in scales(&newest).iter().zip(amax).enumerate() {
        let wanted = f16::from_f32(amax / 127.0).to_f32();
        assert!(scales.iter().all(|&scale| scale == wanted), "{what}, head {head}: {scales:?}");
    }
    let heads = host.data.chunks(TOKENS * HEAD_DIM).zip(amax);
    let wanted =
        heads.flat_map(|(x, &amax)| x.iter().map(move |&x| reference::restore_with(x, amax)));
    equal_bits(what, &Host::of(newest.dequantize()).data, &wanted.collect::<Vec<_>>());
}

/// The largest magnitude of a frame over all its tokens, where it is the first: what `int8_head` of
/// the golden files is.
fn a_frame_has_one_scale_for_each_head<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(300);
    for size in [1e-6f32, 1.0, 3e4, 1e30] {
        let host = frame(&mut rng, 3, size);
        let mut rule = RunningScale::default();
        rule.floor = 1e-30;
        let mut cache = cache(on, "kint8fvint8f", rule, 3);
        cache.append(host.on(on), host.on(on)).unwrap();
        let amax = host
            .data
            .chunks(TOKENS * HEAD_DIM)
            .map(|head| head.iter().map(|x| x.abs()).fold(0.0, f32::max).min(127.0 * 65504.0));
        let amax: Vec<f32> = amax.collect();
        for side in Side::BOTH {
            check(&format!("size {size}, {side}"), &cache, side, &host, &amax);
        }
    }
}

/// Through warm-up, growth that is held back, decay and the floor, in keys by percentile and in
/// values by the largest. Older frames keep their scales.
fn scales_follow_frames<T: Target>(on: &On<T>) {
    let (rules, mut rng) = (rules(), Rng::new(301));
    let mut cache = cache(on, "kint8pvint8f", rules, 2);
    let sizes = [1.0, 0.25, 2.0, 30.0, 30.0, 1.0, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 5.0];
    let mut frames: Vec<Host> = vec![];
    let mut saturates = false;
    for (n, size) in sizes.into_iter().enumerate() {
        let host = frame(&mut rng, 2, size);
        frames.push(host.clone());
        cache.append(host.on(on), host.on(on)).unwrap();
        for (side, percentile) in [(Side::Keys, true), (Side::Values, false)] {
            let amax = (0..2).map(|head| {
                let of_head = frames.iter().map(|frame| {
                    frame.data[head * TOKENS * HEAD_DIM..][..TOKENS * HEAD_DIM].to_vec()
                });
                reference::running_amax(&of_head.collect::<Vec<_>>(), percentile, &rules[side])
            });
            let amax: Vec<Vec<f32>> = amax.collect();
            let newest: Vec<f32> = amax.iter().map(|amax| amax[n]).collect();
            check(&format!("frame {n}, {side}"), &cache, side, &host, &newest);
            let counters = cache.running()[side].clone().expect("scales of frames");
            assert_eq!(counters.scale_max, newest[0].max(newest[1]) / 127.0);
            assert_eq!(counters.scale_min, newest[0].min(newest[1]) / 127.0);
            let heads = host.data.chunks(TOKENS * HEAD_DIM).zip(&newest);
            let beyond = heads.map(|(x, amax)| {
                let beyond = x.iter().filter(|x| x.abs() > *amax).count();
                beyond as f32 / x.len() as f32
            });
            // Means of at most 512 zeros and ones are exact to an ulp.
            for (share, wanted) in counters.saturated.iter().zip(beyond.collect::<Vec<_>>()) {
                assert!((share - wanted).abs() < 1e-6, "frame {n}, {side}: {share} {wanted}");
                saturates |= wanted > 0.0;
            }
            assert_eq!(counters.saturated.len(), 2);
            let changes = amax.iter().map(|amax| match n {
                0 => 0.0,
                n => ((amax[n] - amax[n - 1]) / amax[n - 1]).abs(),
            });
            assert_eq!(counters.change, changes.fold(0.0, f32::max), "frame {n}, {side}");
        }
    }
    assert!(saturates);
    // The frames exercise every branch of the rules.
    let of_head: Vec<Vec<f32>> =
        frames.iter().map(|frame| frame.data[..TOKENS * HEAD_DIM].to_vec()).collect();
    let Sides { keys, values } = rules.map(|rule| reference::running_amax(&of_head, false, &rule));
    assert!(keys[1] == keys[0] && keys[2] > keys[1], "a warm-up: {keys:?}");
    assert!(keys[3] == keys[2] * 1.25 && keys[4] == keys[3] * 1.25, "growth is held: {keys:?}");
    assert!(keys[6] < keys[5] && keys[11] == rules.keys.floor, "decay to the floor: {keys:?}");
    assert!(values[4] == rules.values.ceiling && values[5] < values[4], "a ceiling: {values:?}");
    assert!(values[11] < keys[11], "another momentum and floor: {values:?}");
}

/// Random settings and 10,000 random frames of a head, fewer on a GPU, against the plain model.
fn any_settings_and_frames<T: Target>(on: &On<T>) {
    let frames = if T::NAME == "flex" { 500 } else { 25 };
    let mut rng = Rng::new(304);
    for round in 0..20 {
        let rules = Sides::from_fn(|_| {
            let mut rule = RunningScale::default();
            rule.momentum = [0.0, 0.5, 0.9, 0.999][rng.below(4)] * rng.uniform();
            rule.warm_up = Frames(rng.below(30) as u64);
            rule.growth = 1.0 + [0.0, 0.01, 1.0, 100.0][rng.below(4)] * rng.uniform();
            rule.floor = 10f32.powf(4.0 * rng.uniform() - 6.0);
            rule.ceiling = rule.floor * [1.0, 1e3, 1e6, 1e30][rng.below(4)];
            rule.percentile = [100.0, 99.5, 50.0, 1e-3][rng.below(4)];
            rule
        });
        let mut cache = cache(on, "kint8pvint8f", rules, 1);
        let (mut keys, mut values, mut found) = (vec![], vec![], Sides::<Vec<f32>>::default());
        for _ in 0..frames {
            let [key, value] = [(); 2].map(|()| {
                let size = 10f32.powf(6.0 * rng.uniform() - 3.0);
                frame(&mut rng, 1, size)
            });
            cache.append(key.on(on), value.on(on)).unwrap();
            let counters = cache.running();
            for side in Side::BOTH {
                found[side].push(counters[side].as_ref().unwrap().scale_max);
            }
            keys.push(key.data);
            values.push(value.data);
        }
        for (side, frames, percentile) in [(Side::Keys, keys, true), (Side::Values, values, false)]
        {
            let amax = reference::running_amax(&frames, percentile, &rules[side]);
            let wanted: Vec<f32> = amax.iter().map(|amax| amax / 127.0).collect();
            equal_bits(format!("round {round}, {side}, {:?}", rules[side]), &found[side], &wanted);
        }
    }
}

/// Settings as text: each changes its own field, and what is wrong is named.
fn settings_are_parsed<T: Target>(_: &On<T>) {
    let all = "momentum=0.25,warm-up=7,growth=3,floor=0.5,ceiling=9,percentile=75";
    let rule: RunningScale = all.parse().unwrap();
    assert_eq!((rule.momentum, rule.warm_up, rule.growth), (0.25, Frames(7), 3.0));
    assert_eq!((rule.floor, rule.ceiling, rule.percentile), (0.5, 9.0, 75.0));
    for setting in all.split(',') {
        let one: RunningScale = setting.parse().unwrap();
        let default = RunningScale::default();
        let same = [
            one.momentum == default.momentum,
            one.warm_up == default.warm_up,
            one.growth == default.growth,
            one.floor == default.floor,
            one.ceiling == default.ceiling,
            one.percentile == default.percentile,
        ];
        assert_eq!(same.iter().filter(|same| !**same).count(), 1, "{setting}: {one:?}");
    }
    for (text, wanted) in [
        ("", "running : must be name=number"),
        ("momentum", "running momentum: must be name=number"),
        ("speed=1", "running speed=1: is unknown"),
        ("momentum=fast", "running momentum=fast: must be a number"),
        ("warm-up=1.5", "running warm-up=1.5: must be a whole number"),
        ("floor=1,floor=2", "running floor=2: is set twice"),
        ("momentum=1", "momentum 1: must be at least 0 and below 1"),
        ("growth=inf", "growth inf: must be finite"),
        ("floor=2,ceiling=1", "ceiling 1: must be finite and at least the floor"),
        ("ceiling=nan", "ceiling NaN: must be finite"),
    ] {
        let error = text.parse::<RunningScale>().unwrap_err().to_string();
        assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
    }
}

/// A frame that is written again follows the frame before it, not itself, and hides nothing of it.
fn the_newest_frame_again_is_as_if_it_had_come_once<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(302);
    let frames: Vec<Host> = [1.0, 3.0, 0.5, 8.0, 2.0, 9.0].map(|x| frame(&mut rng, 2, x)).into();
    let other = frame(&mut rng, 2, 40.0);
    let run = |times: usize| {
        let mut cache = cache(on, "kint8fvint8p", rule(), 2);
        for host in &frames {
            let first = if times > 0 { &other } else { host };
            cache.append(first.on(on), first.on(on)).unwrap();
            for i in 0..times {
                let last = if i + 1 == times { host } else { &other };
                let [q, k, v] = [last.on(on), last.on(on), last.on(on)];
                cache.overwrite(q, k, v).unwrap();
            }
        }
        let stored = Side::BOTH.map(|side| cache.newest(side).unwrap().to_logical());
        let query = || frames[0].on(on);
        let seen = Host::of(cache.peek(query(), query(), query()).unwrap().output);
        (stored, cache.running(), seen)
    };
    let once = run(0);
    for times in [1, 2, 3] {
        let again = run(times);
        assert!(once.0 == again.0 && once.1 == again.1, "{times} times");
        equal_bits(format!("{times} times"), &again.2.data, &once.2.data);
    }
}

/// A NaN counts for no scale and is stored as 0; an infinity counts as the largest number that a
/// scale takes.
fn what_is_no_number_leaves_scales_finite<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(303);
    for name in ["kint8fvint8f", "kint8pvint8p"] {
        let mut cache = cache(on, name, rule(), 1);
        let mut host = frame(&mut rng, 1, 1.0);
        cache.append(host.on(on), host.on(on)).unwrap();
        (host.data[3], host.data[20], host.data[21]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        let first = cache.running();
        cache.append(host.on(on), host.on(on)).unwrap();
        for side in Side::BOTH {
            let restored = Host::of(cache.newest(side).unwrap().dequantize()).data;
            assert!(restored.iter().all(|x| x.is_finite()), "{name} {side}: {restored:?}");
            assert_eq!(restored[3], 0.0, "{name} {side}: NaN");
            let scale = cache.running()[side].as_ref().unwrap().scale_max;
            assert!(
                scale.is_finite() && scale >= first[side].as_ref().unwrap().scale_max,
                "{scale}"
            );
        }
    }
}

/// Names are parsed and printed, and every cache that cannot have such a format says why.
fn what_has_no_frames_is_refused<T: Target>(on: &On<T>) {
    for &format in KvFormat::FRAME_ONLY {
        let name = format!("k{format}v16");
        let config: KvCacheConfig = name.parse().unwrap();
        assert_eq!((config.to_string(), config.keys), (name.clone(), format));
        let rule = format!("keys {format}: is available to frame caches only");
        let shape = CacheShape::new(1, 1, HEAD_DIM);
        let error = KvCache::new(&config.with_capacity(8), shape, on).unwrap_err().to_string();
        assert!(error.contains(&rule), "{error}");
        let zeros = Tensor::from_data(TensorData::zeros::<f32, _>([1, 1, 8, HEAD_DIM]), &**on);
        let error = quantize_side(zeros, Side::Keys, &KvCacheConfig::new(format, format))
            .unwrap_err()
            .to_string();
        assert!(error.contains(&rule), "{error}");
        let of = |name: &str, tokens, rule: RunningScale| {
            let config = FrameConfig::new(name.parse().unwrap(), tokens, Frames(3));
            let config = config.with_running(rule);
            FrameCache::new(&config, shape, on).unwrap_err().to_string()
        };
        let error = of(&format!("k16v{format}"), 7, rule_of(|_| ()));
        assert!(error.contains("tokens_per_frame 7: of values as"), "{error}");
        let error = of(&format!("k{format}v16-r4"), 8, rule_of(|_| ()));
        assert!(error.contains("residual_length 4: keys as"), "{error}");
        for (wrong, wanted) in [
            (rule_of(|rule| rule.momentum = 1.0), "momentum 1: must be at least 0 and below 1"),
            (rule_of(|rule| rule.growth = 0.5), "growth 0.5: must be finite and at least 1"),
            (rule_of(|rule| rule.floor = f32::NAN), "floor NaN: must be finite and above 0"),
            (rule_of(|rule| rule.floor = 0.0), "floor 0: must be finite and above 0"),
            (
                rule_of(|rule| rule.ceiling = 1e-9),
                "ceiling 0.000000001: must be finite and at least",
            ),
            (rule_of(|rule| rule.percentile = 0.0), "percentile 0: must be above 0"),
        ] {
            let error = of(&name, 8, wrong);
            assert!(error.contains(wanted), "{error}");
        }
    }
}

fn rule_of(change: impl FnOnce(&mut RunningScale)) -> RunningScale {
    let mut rule = RunningScale::default();
    change(&mut rule);
    rule
}
