//! Products with picked experts, compared with f64.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_weights::{
    Activations, PackedExperts, WeightFormat, project, project_heads, project_picked,
};

use crate::common::{Blocks, Rng, device_blocks, host, matrix, stamp};

stamp!(
    each_pick_is_a_product_with_its_expert,
    picks_out_of_range_select_the_nearest,
    single_experts_are_matrices,
    heads_have_equal_parts_of_a_matrix,
    mismatched_inputs_are_rejected
);

fn floats(x: &[f32], shape: [usize; 3], device: &Device) -> Tensor<3> {
    Tensor::from_data(TensorData::new(x.to_vec(), shape), device)
}

/// Creates `n` experts in one buffer.
fn experts(blocks: &Blocks, n: usize, device: &Device) -> PackedExperts {
    let [rows, columns] = blocks.shape;
    let each: Vec<&[u8]> = blocks.bytes.chunks(blocks.bytes.len() / n).collect();
    PackedExperts::from_bytes(&each, blocks.format, [rows / n, columns], device).unwrap()
}

fn ints(x: &[i32], shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(x.to_vec(), shape), (device, DType::I32))
}

fn each_pick_is_a_product_with_its_expert(device: &Device) {
    // Blocks aligned to words and not, rows of one span and of many.
    let formats = [WeightFormat::Mxfp4, WeightFormat::Q4_0, WeightFormat::Q6K, WeightFormat::Q8_0];
    for (case, format) in formats.into_iter().enumerate() {
        for (n, per_token, n_experts, rows, columns) in
            [(1, 4, 8, 37, 512), (3, 2, 5, 64, 256), (1, 1, 2, 1, 256), (40, 4, 32, 9, 256)]
        {
            let mut rng = Rng::new(1300 + case as u64);
            let blocks = Blocks::random(&mut rng, format, [n_experts * rows, columns]);
            let (packed, weights) = (experts(&blocks, n_experts, device), blocks.restored());
            let picked: Vec<i32> =
                (0..n * per_token).map(|_| rng.below(n_experts) as i32).collect();
            for of_token in [1, per_token] {
                let x = rng.normals(n * of_token * columns);
                let input = floats(&x, [n, of_token, columns], device);
                let numbers = ints(&picked, [n, per_token], device);
                let rounded = |experts, activations| {
                    let (input, numbers) = (input.clone(), numbers.clone());
                    project_picked(input, experts, numbers, activations).unwrap()
                };
                let of = |experts| rounded(experts, Activations::Exact);
                let integers = [Activations::Int16, Activations::Int8];
                let integers = integers.map(|activations| host(rounded(&packed, activations)));
                let y = of(&packed);
                assert_eq!(y.dims(), [n, per_token, rows]);
                let y = host(y);
                let adjacent = PackedExperts::from_rows(&device_blocks(&blocks, device), n_experts);
                assert_eq!(adjacent.is_ok(), (blocks.bytes.len() / n_experts).is_multiple_of(4));
                if let Ok(adjacent) = adjacent {
                    assert_eq!(host(of(&adjacent)), y, "{format} without gaps");
                }
                for (i, got) in y.iter().enumerate() {
                    let (pick, row) = (i / rows, i % rows);
                    let x = &x[pick / (per_token / of_token) * columns..][..columns];
                    let row = picked[pick] as usize * rows + row;
                    let terms = x.iter().zip(&weights[row * columns..][..columns]);
                    let terms = terms.map(|(x, w)| f64::from(*x) * f64::from(*w));
                    let [sum, size] =
                        terms.fold([0.0, 0.0], |[sum, size], t| [sum + t, size + t.abs()]);
                    let error = (f64::from(*got) - sum).abs();
                    // Sums are in f32, in any order.
                    assert!(
                        error <= 1e-5 * size,
                        "{format} of {n_experts} experts, {n} tokens: {i}: {got}, not {sum}"
                    );
                    // The largest of 32 activations is at most five times their mean magnitude, and
                    // rounding is off by at most half a step.
                    for (integers, largest) in integers.iter().zip([32639.0, 127.0]) {
                        let error = (f64::from(integers[i]) - sum).abs();
                        let tolerance = 5.0 * 0.5 / largest + 1e-5;
                        assert!(
                            error <= tolerance * size,
                            "{format} of {n_experts} experts, {n} tokens, integers to {largest}: \
                             {i}: {}, not {sum}",
                            integers[i]
                        );
                    }
                }
            }
        }
    }
}

fn picks_out_of_range_select_the_nearest(device: &Device) {
    let mut rng = Rng::new(1350);
    let packed = experts(&Blocks::random(&mut rng, WeightFormat::Q4_1, [12, 64]), 4, device);
    let x = floats(&rng.normals(64), [1, 1, 64], device);
    let y = |picked: [i32; 2]| {
        let picked = ints(&picked, [1, 2], device);
        let y = project_picked(x.clone(), &packed, picked, Activations::Exact).unwrap();
        host(y)
    };
    assert_eq!(y([-3, i32::MAX]), y([0, 3]));
}

/// Reads single experts at aligned and padded offsets.
fn single_experts_are_matrices(device: &Device) {
    let mut rng = Rng::new(1355);
    let blocks = Blocks::random(&mut rng, WeightFormat::Q4_0, [15, 96]);
    let packed = experts(&blocks, 5, device);
    let weights = blocks.restored();
    let x = rng.normals(2 * 96);
    for number in 0..5 {
        let alone = packed.expert(number).unwrap();
        assert_eq!(alone.dims(), [3, 96]);
        let restored = host(alone.restore().unwrap());
        assert_eq!(restored, weights[number * 3 * 96..][..3 * 96]);
        let picked = ints(&[number as i32; 2], [2, 1], device);
        let wide = floats(&x, [2, 1, 96], device);
        let picked = project_picked(wide, &packed, picked, Activations::Exact).unwrap();
        let y = project(matrix(&x, 96, device), &alone, Activations::Exact).unwrap();
        let [picked, y] = [picked, y].map(host);
        for (a, b) in picked.iter().zip(&y) {
            // The order of the sums may differ.
            assert!((a - b).abs() <= 1e-5, "expert {number}: {a}, not {b}");
        }
    }
    let error = packed.expert(5).unwrap_err().to_string();
    assert_eq!(error, "expert 5: must be below 5, the number of experts");
}

fn heads_have_equal_parts_of_a_matrix(device: &Device) {
    let mut rng = Rng::new(1357);
    // The last matrix is large enough for several threads.
    for (n, n_heads, rows, columns) in [(1, 1, 2, 32), (3, 5, 6, 96), (1, 24, 64, 256)] {
        let blocks = Blocks::random(&mut rng, WeightFormat::Q4_0, [n_heads * rows, columns]);
        let whole = device_blocks(&blocks, device);
        let x = rng.normals(n * n_heads * columns);
        let input = floats(&x, [n, n_heads, columns], device);
        let y = project_heads(input, &whole, Activations::Exact).unwrap();
        assert_eq!(y.dims(), [n, n_heads, rows]);
        let heads = experts(&blocks, n_heads, device);
        for (i, products) in host(y).chunks(rows).enumerate() {
            let x = matrix(&x[i * columns..][..columns], columns, device);
            let head = heads.expert(i % n_heads).unwrap();
            for (a, b) in products.iter().zip(host(project(x, &head, Activations::Exact).unwrap()))
            {
                assert!((a - b).abs() <= 1e-5 * columns as f32, "head {i}: {a}, not {b}");
            }
        }
        let input = floats(&vec![0.0; 7 * columns], [1, 7, columns], device);
        let error = project_heads(input, &whole, Activations::Exact).unwrap_err().to_string();
        let rule = "must be divided into 7 parts of whole words";
        assert_eq!(error, format!("rows {}: {rule}", n_heads * rows));
    }
}

fn mismatched_inputs_are_rejected(device: &Device) {
    let mut rng = Rng::new(1360);
    let blocks = Blocks::random(&mut rng, WeightFormat::Q4_0, [12, 64]);
    let packed = experts(&blocks, 4, device);
    let says = |shape: [usize; 3], picked: [usize; 2], expected: &str| {
        let x = floats(&vec![0.0; shape.iter().product()], shape, device);
        let picked = ints(&vec![0; picked[0] * picked[1]], picked, device);
        let error = project_picked(x, &packed, picked, Activations::Exact).unwrap_err();
        assert_eq!(error.to_string(), expected);
    };
    let columns = "the last axis must be 64, the columns of an expert";
    says([1, 1, 32], [1, 2], &format!("project_picked: x has shape [1, 1, 32]: {columns}"));
    for shape in [[2, 1, 64], [1, 3, 64]] {
        let rule = "must be [1, 1 or 2, 64] to match picked";
        says(shape, [1, 2], &format!("project_picked: x has shape {shape:?}: {rule}"));
    }
    let of = |each: &[&[u8]]| {
        PackedExperts::from_bytes(each, blocks.format, [3, 64], device).unwrap_err().to_string()
    };
    assert_eq!(of(&[]), "experts 0: must be at least 1");
    let message = of(&[&blocks.bytes[..108], &blocks.bytes[..107]]);
    assert!(message.starts_with("bytes 107: must be 108 for each of 2 experts"), "{message}");
}
