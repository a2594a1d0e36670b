//! Scales of frames by their definition.

use half::f16;

use super::formats::Numbers;
use crate::RunningScale;

/// The running amax of a head after each frame, from all numbers of each: of the largest
/// magnitudes, or of the percentile that `rule` says.
pub fn running_amax(frames: &[Vec<f32>], percentile: bool, rule: &RunningScale) -> Vec<f32> {
    let mut running = Vec::new();
    for (n, frame) in frames.iter().enumerate() {
        let limit = 127.0 * 65504.0;
        let size = |x: &f32| if x.is_nan() { 0.0 } else { x.abs().min(limit) };
        let mut sizes: Vec<f32> = frame.iter().map(size).collect();
        sizes.sort_by(f32::total_cmp);
        // Nearest rank: the smallest magnitude that at least `percent` of all do not exceed.
        let percent = if percentile { f64::from(rule.percentile) } else { 100.0 };
        let reached = |i: &usize| (i + 1) as f64 * 100.0 >= percent * sizes.len() as f64;
        let a = sizes[(0..sizes.len()).find(reached).unwrap_or(sizes.len() - 1)];
        let r = match running.last() {
            None => a,
            Some(&before) if n < rule.warm_up.0 as usize => a.max(before),
            Some(&before) => {
                let mean: f32 = before * rule.momentum + a * (1.0 - rule.momentum);
                mean.min(before * rule.growth)
            }
        };
        running.push(r.max(rule.floor).min(rule.ceiling));
    }
    running
}

/// Quantizes and restores a number in int8 with the scale `f16(amax / 127)`.
pub fn restore_with(x: f32, amax: f32) -> f32 {
    let scale = f16::from_f32(amax / 127.0).to_f32();
    if x.is_nan() || scale == 0.0 {
        return 0.0;
    }
    let code = Numbers::Int8.code(f64::from(x.clamp(-amax, amax) / scale));
    f32::from(code as i8) * scale
}
