//! Attention of one token to thousands of entries, against the definition in f64.
//!
//! A step of few tokens shares its rows among cubes, and one that did not would exceed the 65,535
//! iterations that Mesa's CPU device (llvmpipe) grants the loops of an invocation.

use burn::{
    backend::Dispatch,
    tensor::{DType, Int, Tensor, TensorData},
};
use kv_cubecl::{
    CacheFloat, On, Target,
    reference::{self, RowOptions},
    sparse::{AttendInputs, AttendPlan, Compression, RowFormat, RowLayout, Rows, SparseOps},
};

use crate::common::{Rng, stamp, wide};

stamp!(a_token_attends_to_thousands_of_entries);

const WIDTH: usize = 512;
const HEADS: usize = 5;
/// Recent tokens, in a ring of more slots.
const RECENT: usize = 7;
const SLOTS: usize = 9;

fn a_token_attends_to_thousands_of_entries<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(31);
    let sizes = [(200, None), (6001, None), (6001, Some(700))];
    for (n, top_k) in sizes {
        let mut numbers = |n: usize| (0..n).map(|_| rng.normal()).collect::<Vec<f32>>();
        let (query, window, entries) =
            (numbers(HEADS * WIDTH), numbers(SLOTS * WIDTH), numbers(n * WIDTH));
        // One head has no sink.
        let sinks = [0.5, f32::NEG_INFINITY, 3.0, -1.0, 0.0];
        let mut selected: Vec<i32> = (0..top_k.unwrap_or(1)).map(|i| i * 8 + i % 3).collect();
        if let Some(last) = selected.last_mut() {
            *last = -1;
        }

        let [q, recent, all] = [&query, &window, &entries].map(|x| wide(x));
        let recent: Vec<&[f64]> =
            (n - RECENT..n).map(|token| &recent[token % SLOTS * WIDTH..][..WIDTH]).collect();
        let entry = |i: usize| &all[i * WIDTH..][..WIDTH];
        let seen: Vec<&[f64]> = match top_k {
            None => (0..n).map(entry).collect(),
            Some(_) => selected.iter().filter(|i| **i >= 0).map(|i| entry(*i as usize)).collect(),
        };
        let scale = 1.0 / f64::from(WIDTH as u32).sqrt();
        let head = |(query, sink): (&[f64], f32)| {
            let sink = sink.is_finite().then_some(f64::from(sink));
            let options = RowOptions { scale: Some(scale), softcap: None, sink };
            reference::attend_sparse_row(query, &recent, RECENT, &seen, options).output
        };
        let want: Vec<f64> = q.chunks(WIDTH).zip(sinks).flat_map(head).collect();

        let float = |numbers: Vec<f32>| {
            let shape = [numbers.len()];
            Tensor::<1>::from_data(TensorData::new(numbers, shape), &**on)
        };
        let int = |numbers: Vec<i32>| {
            let shape = [numbers.len()];
            Tensor::<1, Int>::from_data(TensorData::new(numbers, shape), (&**on, DType::I32))
        };
        // No tensor is empty: four words stand for no codes.
        let store = |numbers: Vec<f32>, slots: usize| Rows {
            codes: Tensor::<1, Int>::zeros([4], (&**on, DType::U32)).into_dispatch(),
            floats: float(numbers).reshape([1, slots, WIDTH]).into_dispatch(),
        };
        let layout = |slots| RowLayout { batch: 1, slots, width: WIDTH, format: F32 };
        let plan = AttendPlan {
            window: layout(SLOTS),
            sliding_window: RECENT,
            entries: layout(n),
            compression: Some(Compression::new(1)),
            selects: top_k.is_some(),
            scale: scale as f32,
        };
        let top_k = selected.len();
        let inputs = AttendInputs {
            query: float(query).reshape([1, HEADS, 1, WIDTH]).into_dispatch(),
            window: store(window, SLOTS),
            entries: store(entries, n),
            selected: int(selected).reshape([1, 1, top_k]).into_dispatch(),
            sink_logits: float(sinks.to_vec()).into_dispatch(),
        };
        // A sequence of n - 1 tokens gets one more.
        let span = int(vec![n as i32 - 1, 1]).reshape([2, 1]).into_dispatch();
        let got = <Dispatch as SparseOps>::attend_rows(inputs, span, plan);
        let got = Tensor::<4>::from_dispatch(got).into_data();
        for (i, (got, want)) in got.iter::<f64>().zip(&want).enumerate() {
            // f32 sums of thousands of numbers around 1, which mostly cancel.
            assert!((got - want).abs() < 1e-4, "{n} entries, top {top_k}, {i}: {got} not {want}");
        }
    }
}

const F32: RowFormat = RowFormat::float(CacheFloat::F32);
