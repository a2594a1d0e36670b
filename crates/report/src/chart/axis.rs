//! The range of an axis and its ticks, for the mesh of `plotters`. The coordinates of `plotters`
//! itself take ranges below f64's epsilon for empty, and their logarithmic axes have no ticks
//! between powers of ten.

use core::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

/// Beyond this, differences of two values overflow.
const LARGEST: f64 = 1e300;
/// Ticks an axis aims for.
const TICKS: f64 = 8.0;

/// Checks that `value` can be drawn.
pub(super) fn check(value: f64, log: bool) -> Result<(), String> {
    match value {
        _ if !value.is_finite() || value.abs() > LARGEST => Err(format!("{value} cannot be drawn")),
        _ if log && value < 1.0 / LARGEST => {
            Err(format!("{value} is not above 0, as a logarithmic axis needs"))
        }
        _ => Ok(()),
    }
}

/// One axis; `low < high`, in powers of ten if it is logarithmic.
#[derive(Debug)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    log: bool,
    /// The distance of ticks, in data units. `None` on a logarithmic axis over at least a power of
    /// ten: its ticks are powers of ten, and on a short one also 2 and 5 times these.
    step: Option<f64>,
}

impl Axis {
    /// An axis over `values`, which all pass [`check`], and a margin of `margin` times their
    /// range on either side. `None` for no values.
    pub(super) fn new(values: &[f64], log: bool, margin: f64) -> Option<Self> {
        let placed = values.iter().map(|&value| if log { value.log10() } else { value });
        let (low, high) = placed
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        let whole = !log && values.iter().all(|value| value.fract() == 0.0);
        let (range, largest) = (high - low, low.abs().max(high.abs()));
        // Equal values are given some range. Elsewhere, an axis of values that are not negative
        // does not go below zero.
        let (room, floor) = match range <= largest * 1e-9 {
            true if log => (0.3, f64::NEG_INFINITY),
            true => ((largest * 0.05).max(if whole { 1.0 } else { 1e-12 }), f64::NEG_INFINITY),
            false if !log && low >= 0.0 => (range * margin, 0.0),
            false => (range * margin, f64::NEG_INFINITY),
        };
        let (low, high) = ((low - room).max(floor), high + room);
        let ends = if log { 10f64.powf(high) - 10f64.powf(low) } else { high - low };
        let scale = 10f64.powf((ends / TICKS).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * scale);
        let step = step.into_iter().find(|step| step * TICKS >= ends).unwrap_or(ends);
        let step = if whole { step.max(1.0) } else { step };
        let step = (!log || high - low < 1.0).then_some(step);
        (!values.is_empty()).then_some(Self { low, high, log, step })
    }

    /// Returns whether `value` lies within the axis.
    pub(super) fn holds(&self, value: f64) -> bool {
        self.range().contains(&value)
    }

    /// Returns the values of the mesh's lines in ascending order.
    pub(super) fn ticks(&self) -> Vec<f64> {
        let Range { start, end } = self.range();
        if let Some(step) = self.step {
            let (first, last) = ((start / step - 1e-9).ceil(), (end / step + 1e-9).floor());
            let n = (last - first).clamp(0.0, 4.0 * TICKS) as usize;
            return (0..=n).map(|i| (first + i as f64) * step).collect();
        }
        let every = ((self.high - self.low) / TICKS).ceil() as usize;
        let factors: &[f64] = if self.high - self.low < 3.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let powers = (self.low.floor() as i32..=self.high.ceil() as i32).step_by(every);
        let values = powers.flat_map(|power| factors.iter().map(move |x| x * 10f64.powi(power)));
        values.filter(|value| (self.low..=self.high).contains(&value.log10())).collect()
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (first, last): (i32, i32)) -> i32 {
        let value = if self.log { value.log10() } else { *value };
        let place = (value - self.low) / (self.high - self.low);
        first + (place * f64::from(last - first)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks()
    }

    fn range(&self) -> Range<f64> {
        match self.log {
            true => 10f64.powf(self.low)..10f64.powf(self.high),
            false => self.low..self.high,
        }
    }
}

impl ValueFormatter<f64> for Axis {
    /// Formats a tick with enough digits to distinguish it from its neighbors.
    fn format_ext(&self, value: &f64) -> String {
        let step = self.step.unwrap_or(*value);
        let digit = (step.abs().log10() + 1e-9).floor().max(-300.0) as i32;
        match value.abs() {
            size if size < step / 2.0 => "0".to_string(),
            size if digit >= -6 && size < 1e6 => {
                format!("{value:.*}", (-digit).max(0) as usize)
            }
            size => {
                let digits = (size.log10() + 1e-9).floor() as i32 - digit;
                format!("{value:.*e}", digits.clamp(0, 12) as usize)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(values: &[f64], log: bool) -> Vec<String> {
        let axis = Axis::new(values, log, 0.0).unwrap();
        let ticks = axis.ticks();
        assert!(axis.low < axis.high && ticks.is_sorted_by(|a, b| a < b), "{axis:?} {ticks:?}");
        for value in &ticks {
            assert!((0..=100_000).contains(&axis.map(value, (0, 100_000))), "{value} {axis:?}");
        }
        ticks.iter().map(|value| axis.format_ext(value)).collect()
    }

    #[test]
    fn ticks_are_round_numbers_within_the_range() {
        assert_eq!(texts(&[0.0, 100.0], false), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(texts(&[0.0, 1.0, 2.0], false), ["0", "1", "2"]);
        assert_eq!(texts(&[3.1, 3.3], false), ["3.10", "3.15", "3.20", "3.25", "3.30"]);
        assert_eq!(texts(&[1e-7, 3e-7], false), ["1.0e-7", "1.5e-7", "2.0e-7", "2.5e-7", "3.0e-7"]);
        assert_eq!(texts(&[1.0, 100.0], true), ["1", "2", "5", "10", "20", "50", "100"]);
        assert_eq!(texts(&[1e-9, 1e-6], true), ["1e-9", "1e-8", "1e-7", "0.000001"]);
        let within_a_power = ["21.0", "21.5", "22.0", "22.5", "23.0", "23.5", "24.0"];
        assert_eq!(texts(&[21.0, 24.0], true), within_a_power);
    }

    #[test]
    fn every_finite_range_has_ticks() {
        let large = [-1e300, -1e16, -1.0, 0.0, 1e-300, 1e-20, 0.3, 7.0, 1e16, 1e16 + 2.0, 1e300];
        for (&a, &b) in large.iter().flat_map(|a| large.iter().map(move |b| (a, b))) {
            assert!(!texts(&[a, b], false).is_empty(), "{a} {b}");
            assert!(a <= 0.0 || b <= 0.0 || !texts(&[a, b], true).is_empty(), "log {a} {b}");
        }
        for (bad, log) in [(f64::NAN, false), (f64::INFINITY, false), (1e301, false), (0.0, true)] {
            check(bad, log).unwrap_err();
        }
        assert!(Axis::new(&[], false, 0.1).is_none());
    }
}
