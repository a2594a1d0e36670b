//! Caches of frames against lists of frames, attended to in f64.

use burn::tensor::{DType, Tensor};
use kv_cubecl::{
    Attention, AttentionOptions, CacheFloat, CacheShape, FakeQuantOptions, FrameCache, FrameConfig,
    Frames, KvFormat, On, Side, Sides, Target, frame_attention,
    reference::{self, RowOptions, StreamOracle, attend_row_with},
};

use crate::common::{CLOSE, Host, Rng, close, equal_bits, skipped, stamp, wide};

#[cfg(feature = "autodiff")]
mod gradients;
mod limits;

stamp!(
    any_updates_peeks_and_rewrites,
    all_frames_at_once,
    a_long_stream_goes_on_like_a_short_one,
    scores_are_changed_as_options_say
);

const HEAD_DIM: usize = 16;

/// Keys, values and queries of a frame.
#[derive(Clone)]
struct Frame {
    query: Host,
    key: Host,
    value: Host,
}

/// Tokens that the tokens of a frame see.
#[derive(Clone, Default)]
struct Seen {
    tokens: Vec<usize>,
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

impl Seen {
    fn keys(&self) -> Vec<&[f64]> {
        self.keys.iter().map(Vec::as_slice).collect()
    }

    fn values(&self) -> Vec<&[f64]> {
        self.values.iter().map(Vec::as_slice).collect()
    }
}

/// A cache, and the frames that were written to it.
struct Case {
    config: FrameConfig,
    shape: CacheShape,
    n_heads: usize,
    frames: Vec<Frame>,
}

impl Case {
    fn new(config: FrameConfig, [batch, n_heads, n_kv_heads]: [usize; 3]) -> Self {
        let shape = CacheShape::new(batch, n_kv_heads, HEAD_DIM);
        Self { config, shape, n_heads, frames: Vec::new() }
    }

    fn cache<T: Target>(&self, on: &On<T>) -> FrameCache {
        FrameCache::new(&self.config, self.shape, on).unwrap()
    }

    fn random(&self, rng: &mut Rng) -> Frame {
        let CacheShape { batch, n_kv_heads, .. } = self.shape;
        let tokens = self.config.tokens_per_frame;
        Frame {
            query: Host::normal(rng, [batch, self.n_heads, tokens, HEAD_DIM]),
            key: Host::keys(rng, [batch, n_kv_heads, tokens, HEAD_DIM]),
            value: Host::normal(rng, [batch, n_kv_heads, tokens, HEAD_DIM]),
        }
    }

    /// Returns the tokens that a frame after all of `frames` sees by definition, for each (batch,
    /// kv head): the stored tokens with their keys and values as the cache stores them, then the
    /// frame's own, unchanged.
    fn seen(&self, frames: &[Frame], new: &Frame) -> Vec<Seen> {
        let FrameConfig { format, tokens_per_frame: tokens, sliding_window: window, sinks, .. } =
            self.config;
        let CacheShape { batch, n_kv_heads, .. } = self.shape;
        let sink_tokens = sinks.tokens(tokens);
        let [keys, values] = [format.keys, format.values].map(|format| match of_frames(format) {
            true => KvFormat::Int8,
            false => format,
        });
        let of_tokens = format.with_formats(keys, values).with_sink_tokens(sink_tokens);
        let mut oracle = StreamOracle::new(&of_tokens, self.shape);
        let row = |side: &Host, lane: usize, token: usize| {
            side.data[(lane * tokens + token) * HEAD_DIM..][..HEAD_DIM].to_vec()
        };
        let lanes = batch * n_kv_heads;
        let mut stored = None;
        for frame in frames {
            for token in 0..tokens {
                let all = |side: &Host| -> Vec<f32> {
                    (0..lanes).flat_map(|lane| row(side, lane, token)).collect()
                };
                let lanes = oracle.step_with(&all(&frame.key), &all(&frame.value), <[_]>::to_vec);
                stored = Some(lanes);
            }
        }
        let first = frames.len().saturating_sub(window.0 as usize - 1);
        let before: Vec<usize> = (0..frames.len())
            .filter(|&frame| frame < sinks.0 as usize || frame >= first)
            .flat_map(|frame| frame * tokens..(frame + 1) * tokens)
            .collect();
        let seen = (0..lanes).map(|lane| {
            let mut seen = Seen { tokens: before.clone(), ..Seen::default() };
            if let Some(stored) = &stored {
                seen.keys.extend(stored[lane].keys(&before).into_iter().map(<[_]>::to_vec));
                seen.values.extend(stored[lane].values(&before).into_iter().map(<[_]>::to_vec));
            }
            for (side, rows) in [(Side::Keys, &mut seen.keys), (Side::Values, &mut seen.values)] {
                if of_frames(format.format(side)) {
                    let scaled = self.scaled(side, lane, frames);
                    for (row, token) in rows.iter_mut().zip(&before) {
                        if let Some(at) = token.checked_sub(sink_tokens) {
                            row.clone_from(&scaled[at]);
                        }
                    }
                }
            }
            for token in 0..tokens {
                seen.tokens.push(frames.len() * tokens + token);
                seen.keys.push(wide(&row(&new.key, lane, token)));
                seen.values.push(wide(&row(&new.value, lane, token)));
            }
            seen
        });
        seen.collect()
    }

    /// A side of the tokens of `frames` after the sinks, as it is stored but for rounding, of one
    /// (batch, kv head), and the running amax of each frame.
    fn amax(&self, side: Side, lane: usize, frames: &[Frame]) -> (Vec<Vec<f32>>, Vec<f32>) {
        let FrameConfig { format, tokens_per_frame: tokens, sinks, ref running, .. } = self.config;
        let after = &frames[frames.len().min(sinks.0 as usize)..];
        let rows = after.iter().map(|frame| {
            let host = if side == Side::Keys { &frame.key } else { &frame.value };
            let mut rows = host.data[lane * tokens * HEAD_DIM..][..tokens * HEAD_DIM].to_vec();
            if format.uses_hadamard(side) {
                rows = rows.chunks(HEAD_DIM).flat_map(reference::hadamard).collect();
            }
            rows
        });
        let rows: Vec<Vec<f32>> = rows.collect();
        let percentile = format.format(side) == KvFormat::Int8Percentile;
        let amax = reference::running_amax(&rows, percentile, &running[side]);
        (rows, amax)
    }

    /// Quantizes and restores the tokens of `frames` after the sinks, with scales taken from
    /// frames.
    fn scaled(&self, side: Side, lane: usize, frames: &[Frame]) -> Vec<Vec<f64>> {
        let (rows, amax) = self.amax(side, lane, frames);
        let restored = rows.iter().zip(amax).flat_map(|(rows, amax)| {
            let restored = rows.iter().map(|&x| reference::restore_with(x, amax));
            let mut restored: Vec<f32> = restored.collect();
            if self.config.format.uses_hadamard(side) {
                restored = restored.chunks(HEAD_DIM).flat_map(reference::hadamard).collect();
            }
            restored.chunks(HEAD_DIM).map(wide).collect::<Vec<_>>()
        });
        restored.collect()
    }

    /// Output and log-sum-exp of a frame that comes after all of `frames`.
    fn expected(&self, frames: &[Frame], new: &Frame, options: RowOptions) -> (Vec<f64>, Vec<f64>) {
        let (mut output, mut lses) = (Vec::new(), Vec::new());
        let lanes = self.seen(frames, new);
        let rows = new.query.shape[2];
        for (index, query) in new.query.data.chunks(HEAD_DIM).enumerate() {
            let seen = &lanes[index / rows / (self.n_heads / self.shape.n_kv_heads)];
            let row = attend_row_with(&wide(query), &seen.keys(), &seen.values(), options);
            output.extend(row.output);
            lses.push(row.lse);
        }
        (output, lses)
    }

    #[track_caller]
    fn check(&self, what: &str, frames: &[Frame], new: &Frame, got: Attention) {
        let (output, lse) = self.expected(frames, new, RowOptions::default());
        close(what, &Host::of(got.output), &output, CLOSE);
        let lses: Vec<f32> = got.lse.into_data().iter::<f32>().collect();
        for (got, want) in lses.iter().zip(lse) {
            assert!((f64::from(*got) - want).abs() < 1e-4, "{what}: log-sum-exp {got}, not {want}");
        }
    }
}

fn on<T: Target>(frame: &Frame, on: &On<T>) -> [Tensor<4>; 3] {
    [&frame.query, &frame.key, &frame.value].map(|side| side.on(on))
}

/// Formats, tokens of a frame, frames of a window, of sinks: residual windows within frames, of
/// whole frames and across them, groups that frames cut, and none.
const CONFIGS: [(&str, usize, u64, u64); 21] = [
    ("float", 4, 2, 0),
    ("float", 7, 4, 1),
    ("float-f16", 8, 3, 0),
    ("float-bf16", 8, 4, 2),
    ("k4v4-g8-r8", 8, 3, 0),
    ("k8v2-g16-r16", 8, 5, 1),
    ("k16v8-g8-r8", 6, 4, 0),
    ("k2v16-g16-r32", 12, 4, 2),
    ("k8v8-g8-r24-gflush", 10, 5, 0),
    ("k4v8-g8-r16-gflush-hadv", 9, 4, 1),
    ("kint8vint8", 8, 4, 0),
    ("kint8vint8", 7, 3, 1),
    ("k16vint8", 5, 5, 0),
    ("kint8v16-r6", 4, 4, 2),
    ("kint8v4-g8-r8-hadv", 6, 4, 0),
    ("kint8vint8-hadk-hadv", 8, 4, 0),
    ("kint8v16-r6-hadk", 4, 4, 1),
    ("kint8fvint8f", 8, 4, 0),
    ("k16vint8p", 6, 3, 1),
    ("kint8pvint8", 12, 4, 2),
    ("kint8fvint8p-hadk-hadv", 8, 5, 1),
];

fn of_frames(format: KvFormat) -> bool {
    KvFormat::FRAME_ONLY.contains(&format)
}

fn config((name, tokens, window, sinks): (&str, usize, u64, u64)) -> FrameConfig {
    let running = Sides {
        keys: "momentum=0.5,warm-up=1,growth=1.1,percentile=90".parse().unwrap(),
        values: "momentum=0.8,warm-up=2,ceiling=2,percentile=70".parse().unwrap(),
    };
    FrameConfig::new(name.parse().unwrap(), tokens, Frames(window))
        .with_sinks(Frames(sinks))
        .with_running(running)
}

fn lacks<T: Target>(on: &On<T>, float: CacheFloat) -> bool {
    let dtype = match float {
        CacheFloat::F16 => DType::F16,
        CacheFloat::Bf16 => DType::BF16,
        _ => return false,
    };
    let lacks = !on.supports_dtype(dtype);
    if lacks {
        skipped(&format!("the device has no {dtype:?}"));
    }
    lacks
}

/// Whatever is peeked at and however often a frame is rewritten, every answer is that of the frames
/// as they were written last.
fn any_updates_peeks_and_rewrites<T: Target>(device: &On<T>) {
    for (seed, of) in (70..).zip(CONFIGS) {
        let config = config(of);
        if lacks(device, config.format.float) {
            continue;
        }
        let mut rng = Rng::new(seed);
        let mut case = Case::new(config, [1 + rng.below(2), 2, 1 + rng.below(2)]);
        let mut cache = case.cache(device);
        let mut story = format!("seed {seed}, {of:?}:");
        for _ in 0..40 {
            let new = case.random(&mut rng);
            let [query, key, value] = on(&new, device);
            let written = case.frames.len();
            match rng.below(4) {
                0 => {
                    story += " peek";
                    let got = cache.peek(query, key, value).unwrap();
                    case.check(&story, &case.frames, &new, got);
                }
                1 if written > 0 => {
                    story += " overwrite";
                    case.frames.pop();
                    let got = cache.overwrite(query, key, value).unwrap();
                    case.check(&story, &case.frames, &new, got);
                    case.frames.push(new);
                }
                2 => {
                    // What is peeked at is what an update then gives.
                    story += " both";
                    let peeked = cache.peek(query.clone(), key.clone(), value.clone()).unwrap();
                    let got = cache.update(query, key, value).unwrap();
                    equal_bits(&story, &Host::of(peeked.output).data, &Host::of(got.output).data);
                    case.frames.push(new);
                }
                _ => {
                    story += " update";
                    let got = cache.update(query, key, value).unwrap();
                    case.check(&story, &case.frames, &new, got);
                    case.frames.push(new);
                }
            }
            assert_eq!(cache.written(), Frames(case.frames.len() as u64), "{story}");
        }
        assert!(case.frames.len() > 2 * of.2 as usize, "{story}: too short");
    }
}

/// Nine frames one after the other.
fn sequence(of: (&str, usize, u64, u64), seed: u64) -> Case {
    let mut rng = Rng::new(seed);
    let mut case = Case::new(config(of), [2, 2, 1 + rng.below(2)]);
    case.frames = (0..9).map(|_| case.random(&mut rng)).collect();
    case
}

impl Case {
    /// Queries, keys and values of all frames.
    fn whole(&self) -> [Host; 3] {
        let sides: [fn(&Frame) -> &Host; 3] = [|f| &f.query, |f| &f.key, |f| &f.value];
        sides.map(|side| {
            Host::cat(&self.frames.iter().map(|frame| side(frame).clone()).collect::<Vec<_>>())
        })
    }

    fn at_once(&self, [query, key, value]: [Tensor<4>; 3]) -> Tensor<4> {
        let (fake_quant, options) = (FakeQuantOptions::default(), AttentionOptions::default());
        frame_attention(query, key, value, &self.config, fake_quant, options).unwrap()
    }
}

/// The closed form is what the stream gives.
fn all_frames_at_once<T: Target>(device: &On<T>) {
    for (seed, of) in (90..).zip(CONFIGS) {
        let case = sequence(of, seed);
        if lacks(device, case.config.format.float) {
            continue;
        }
        let got = Host::of(case.at_once(case.whole().map(|side| side.on(device))));
        for (frame, new) in case.frames.iter().enumerate() {
            let (want, _) = case.expected(&case.frames[..frame], new, RowOptions::default());
            let got = got.tokens(frame * of.1..(frame + 1) * of.1);
            close(format!("{of:?}, frame {frame}"), &got, &want, CLOSE);
        }
    }
}

/// Positions repeat: after as many frames as they take to, a cache gives the same bits for the same
/// frames.
fn a_long_stream_goes_on_like_a_short_one<T: Target>(device: &On<T>) {
    for of in [("float", 4, 3, 1), ("k4v4-g8-r16", 8, 4, 0)] {
        let case = Case::new(config(of), [1, 1, 1]);
        let mut rng = Rng::new(5);
        let frames: Vec<_> = (0..12).map(|_| case.random(&mut rng)).collect();
        let run = |before: u64| {
            let mut cache = case.cache(device);
            let zero = case.random(&mut Rng::new(6));
            for _ in 0..before {
                let [_, key, value] = on(&zero, device);
                cache.append(key, value).unwrap();
            }
            let outputs = frames.iter().map(|frame| {
                let [query, key, value] = on(frame, device);
                Host::of(cache.update(query, key, value).unwrap().output).data
            });
            let outputs: Vec<_> = outputs.collect();
            assert_eq!(cache.written(), Frames(before + 12));
            outputs
        };
        let (short, long) = (run(6), run(106));
        for (frame, (short, long)) in short.iter().zip(&long).enumerate() {
            let want: Vec<f64> = short.iter().map(|&x| f64::from(x)).collect();
            let got = Host { data: long.clone(), shape: [1, 1, of.1, HEAD_DIM] };
            close(format!("{of:?}, frame {frame}"), &got, &want, CLOSE);
        }
    }
}

fn scores_are_changed_as_options_say<T: Target>(device: &On<T>) {
    let mut case = Case::new(config(("float", 6, 3, 0)), [1, 4, 2]);
    let options = AttentionOptions::default().with_scale(0.4).with_softcap(1.5);
    let rows = RowOptions { scale: Some(0.4f32.into()), softcap: Some(1.5), sink: None };
    let mut cache = case.cache(device).with_options(options).unwrap();
    let mut rng = Rng::new(9);
    for frame in 0..5 {
        let new = case.random(&mut rng);
        let [query, key, value] = on(&new, device);
        let got = Host::of(cache.update(query, key, value).unwrap().output);
        close(format!("frame {frame}"), &got, &case.expected(&case.frames, &new, rows).0, CLOSE);
        case.frames.push(new);
    }
}
