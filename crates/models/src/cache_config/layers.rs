//! Sets of layers, counted from either end of a model.

use core::{fmt, ops::Range, str::FromStr};

use serde_json::Value;

/// Some layers of a model, counted from 0, or from the end: -1 is the last.
///
/// Its text is a list of layers and half-open ranges: `0`, `-1`, `0,29`, `0..4` (the first four),
/// `-4..` (the last four), `2..-2` (all except two at each end), `..` (all).
///
/// ```
/// use kv_models::Layers;
///
/// let ends: Layers = "0..2,-1".parse().map_err(|rule| format!("layers: {rule}"))?;
/// let of_ten: Vec<usize> = (0..10).filter(|&layer| ends.contains(layer, 10)).collect();
/// assert_eq!(of_ten, [0, 1, 9]);
/// assert!("4..4".parse::<Layers>().is_err(), "a range has a layer");
/// assert!(Layers::last(0).to_string().parse::<Layers>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layers(Vec<Span>);

/// A layer, or the end of a range, counted from one end of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Counted from the first layer, 0.
    Start(usize),
    /// Counted from the end: 1 is the last layer, and 0 follows it.
    End(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Span {
    One(At),
    Range(At, At),
}

impl At {
    /// Returns the number from the start in a model of `n` layers; `None` before the first layer.
    fn of(self, n: usize) -> Option<usize> {
        match self {
            Self::Start(at) => Some(at),
            Self::End(at) => n.checked_sub(at),
        }
    }

    /// Parses a layer. `open` is the value of an end that a range leaves out.
    fn read(text: &str, open: Option<Self>) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a layer: 0 is the first, -1 the last");
        if let (true, Some(open)) = (text.is_empty(), open) {
            return Ok(open);
        }
        let digits = text.strip_prefix('-').unwrap_or(text);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong());
        }
        let number = digits.parse().map_err(|_| wrong())?;
        match (text.starts_with('-'), number) {
            (true, 0) => Err(wrong()),
            (true, _) => Ok(Self::End(number)),
            (false, _) => Ok(Self::Start(number)),
        }
    }
}

/// Returns the message for an empty range.
fn no_layer(range: &dyn fmt::Display) -> String {
    format!("{range} has no layer: the end of a range is excluded")
}

impl Span {
    const ALL: Self = Self::Range(At::Start(0), At::End(0));

    fn read(text: &str) -> Result<Self, String> {
        let Some((start, end)) = text.split_once("..") else {
            return Ok(Self::One(At::read(text, None)?));
        };
        let start = At::read(start, Some(At::Start(0)))?;
        let end = At::read(end, Some(At::End(0)))?;
        let range = Self::Range(start, end);
        match range.is_empty() {
            true => Err(no_layer(&text)),
            false => Ok(range),
        }
    }

    /// Returns whether the span has no layer in any model.
    fn is_empty(self) -> bool {
        match self {
            Self::Range(At::Start(start), At::Start(end)) => start >= end,
            Self::Range(At::End(start), At::End(end)) => start <= end,
            Self::One(_) | Self::Range(..) => false,
        }
    }

    /// Returns the layers in a model of `n`; `None` if the model lacks one of them.
    fn of(self, n: usize) -> Option<Range<usize>> {
        let (start, end) = match self {
            Self::One(at) => (at.of(n)?, at.of(n)?.checked_add(1)?),
            Self::Range(start, end) => (start.of(n)?, end.of(n)?),
        };
        (end <= n).then_some(start..end)
    }
}

impl Layers {
    /// Returns all layers.
    pub fn all() -> Self {
        Self(vec![Span::ALL])
    }

    /// Returns the first `n` layers.
    pub fn first(n: usize) -> Self {
        Self::from(0..n)
    }

    /// Returns the last `n` layers.
    pub fn last(n: usize) -> Self {
        Self(vec![Span::Range(At::End(n), At::End(0))])
    }

    /// Groups ascending layers into ranges of consecutive layers: `0..3,7`.
    pub fn runs(layers: impl IntoIterator<Item = usize>) -> Self {
        let mut runs: Vec<Range<usize>> = vec![];
        for layer in layers {
            match runs.last_mut() {
                Some(run) if run.end == layer => run.end += 1,
                _ => runs.push(layer..layer + 1),
            }
        }
        runs.into_iter().collect()
    }

    /// Parses layers from a number, a string, or a list of these.
    pub(super) fn from_value(value: &Value) -> Result<Self, String> {
        let one = |value: &Value| match value {
            Value::Number(number) => Ok(number.to_string()),
            Value::String(text) => Ok(text.clone()),
            _ => Err("must be a layer, a range such as \"0..4\", or a list of these".to_string()),
        };
        let text = match value {
            Value::Array(list) => list.iter().map(one).collect::<Result<Vec<_>, _>>()?.join(","),
            value => one(value)?,
        };
        text.parse()
    }

    /// Returns whether these are all layers of any model.
    pub fn is_all(&self) -> bool {
        self.0 == [Span::ALL]
    }

    /// Returns the layers if each is listed and counted from the start.
    pub(super) fn numbers(&self) -> Option<Vec<usize>> {
        let number = |span: &Span| match span {
            Span::One(At::Start(layer)) => Some(*layer),
            _ => None,
        };
        self.0.iter().map(number).collect()
    }

    /// Returns whether a model of `n_layers` has `layer`, counted from 0, among these.
    pub fn contains(&self, layer: usize, n_layers: usize) -> bool {
        self.0.iter().any(|span| span.of(n_layers).is_some_and(|span| span.contains(&layer)))
    }

    /// Checks that there is a layer, and that no range is empty in every model. Other texts cannot
    /// be parsed back.
    pub(super) fn check_any(&self) -> Result<(), String> {
        match self.0.iter().find(|span| span.is_empty()) {
            Some(empty) => Err(no_layer(empty)),
            None if self.0.is_empty() => Err("must have at least one layer".into()),
            None => Ok(()),
        }
    }

    /// Checks that `of`, which has `n` layers, has all of these, and that no range is empty there.
    pub(super) fn check(&self, n: usize, of: &str) -> Result<(), String> {
        for span in &self.0 {
            match span.of(n) {
                None => return Err(format!("{of} has layers 0 to {}", n.saturating_sub(1))),
                Some(range) if range.is_empty() => {
                    return Err(format!("{span} has no layer in a model of {n}"));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
}

impl From<usize> for Layers {
    fn from(layer: usize) -> Self {
        Self(vec![Span::One(At::Start(layer))])
    }
}

impl From<Range<usize>> for Layers {
    fn from(range: Range<usize>) -> Self {
        Self(vec![Span::Range(At::Start(range.start), At::Start(range.end))])
    }
}

impl FromIterator<usize> for Layers {
    fn from_iter<I: IntoIterator<Item = usize>>(layers: I) -> Self {
        Self(layers.into_iter().map(|layer| Span::One(At::Start(layer))).collect())
    }
}

impl FromIterator<Range<usize>> for Layers {
    /// Ranges of one layer are displayed as that layer.
    fn from_iter<I: IntoIterator<Item = Range<usize>>>(ranges: I) -> Self {
        let span = |range: Range<usize>| match range.start.checked_add(1) == Some(range.end) {
            true => Span::One(At::Start(range.start)),
            false => Span::Range(At::Start(range.start), At::Start(range.end)),
        };
        Self(ranges.into_iter().map(span).collect())
    }
}

impl FromStr for Layers {
    /// The rule that the text breaks.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(text.split(',').map(Span::read).collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(at) => write!(f, "{at}"),
            Self::End(0) => Ok(()),
            Self::End(at) => write!(f, "-{at}"),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(at) => write!(f, "{at}"),
            Self::Range(At::Start(0), At::End(0)) => write!(f, ".."),
            // `-0` cannot be parsed, so an empty range is not read back as another one.
            Self::Range(At::End(0), end) => write!(f, "-0..{end}"),
            Self::Range(start, end) => write!(f, "{start}..{end}"),
        }
    }
}

impl fmt::Display for Layers {
    /// Writes the text that parses to these layers. Without a layer, it writes a text that does not
    /// parse.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return write!(f, "none");
        }
        for (i, span) in self.0.iter().enumerate() {
            write!(f, "{}{span}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}
