//! What one thread did: the bars of its spans, and their sums.

use std::collections::HashMap;

use kv_report::timeline::Bar;

use crate::label::Named;

/// Sums over the spans of a group in the phases of a group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) count: u64,
    /// Nanoseconds without inner spans.
    pub(crate) own: u64,
    /// Nanoseconds with inner spans.
    pub(crate) whole: u64,
    pub(crate) amounts: Amounts,
}

/// The amounts that spans work on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amounts {
    /// Bytes of weights or of a cache that are read.
    pub(crate) bytes: u64,
    pub(crate) tokens: u64,
}

impl Amounts {
    pub(crate) fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.tokens += other.tokens;
    }
}

/// A phase and a group, both by their group's number.
pub(crate) type PhaseGroup = (u32, u32);

/// A span that has begun.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// The span's id; `None` for a layer, which is no span but lasts until something ends it.
    span: Option<u64>,
    named: Named,
    phase: u32,
    amounts: Amounts,
    start: u64,
    /// Nanoseconds of the spans within it that have ended.
    inner: u64,
}

/// A launch that was issued and whose time is not known yet.
#[cfg(feature = "cube")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Issued {
    pub(crate) label: Option<u32>,
    pub(crate) place: PhaseGroup,
    /// True for a part of a captured step that is launched.
    pub(crate) in_step: bool,
    pub(crate) at: u64,
    /// Time the host took to issue it, once known.
    pub(crate) host: u64,
}

/// Spans and sums of one thread so far.
#[derive(Debug)]
pub(crate) struct ThreadLog {
    /// The thread's place among those that were recorded.
    #[cfg(feature = "cube")]
    pub(crate) number: usize,
    pub(crate) name: String,
    open: Vec<Open>,
    pub(crate) bars: Vec<Bar>,
    /// Bars that there was no room for.
    pub(crate) dropped: u64,
    pub(crate) sums: HashMap<PhaseGroup, Sum>,
    #[cfg(feature = "cube")]
    pub(crate) issued: Option<Issued>,
    /// Launches without a measurement.
    #[cfg(feature = "cube")]
    pub(crate) unmeasured: u64,
    /// The replay that is being measured.
    #[cfg(feature = "cube")]
    pub(crate) replay: Option<(cubecl::client::ProfileWindow, Issued)>,
}

impl ThreadLog {
    #[cfg_attr(
        not(feature = "cube"),
        expect(unused_variables, reason = "only launches need the number")
    )]
    pub(crate) fn new(number: usize, name: String) -> Self {
        Self {
            #[cfg(feature = "cube")]
            number,
            name,
            open: vec![],
            bars: vec![],
            dropped: 0,
            sums: HashMap::new(),
            #[cfg(feature = "cube")]
            issued: None,
            #[cfg(feature = "cube")]
            unmeasured: 0,
            #[cfg(feature = "cube")]
            replay: None,
        }
    }

    /// Begins a span.
    pub(crate) fn enter(
        &mut self,
        span: u64,
        named: Named,
        (phase, amounts): (u32, Amounts),
        now: u64,
    ) {
        if !named.in_layer {
            self.end_layer(now);
        }
        self.open.push(Open { span: Some(span), named, phase, amounts, start: now, inner: 0 });
    }

    /// A layer begins; it ends with the next, with the pass, or with an operation that is in no
    /// layer.
    pub(crate) fn layer(&mut self, named: Named, phase: u32, now: u64) {
        self.end_layer(now);
        let amounts = Amounts::default();
        self.open.push(Open { span: None, named, phase, amounts, start: now, inner: 0 });
    }

    /// Ends a span, and the spans that are still open within it.
    pub(crate) fn exit(&mut self, span: u64, now: u64) {
        let Some(at) = self.open.iter().rposition(|open| open.span == Some(span)) else { return };
        while self.open.len() > at {
            self.close(now);
        }
    }

    /// Ends all open spans.
    pub(crate) fn finish(&mut self, now: u64) {
        while !self.open.is_empty() {
            self.close(now);
        }
    }

    /// Records a launch by the innermost span.
    #[cfg(feature = "cube")]
    pub(crate) fn issue(&self, at: u64) -> Issued {
        let open = self.open.last();
        let place = open.map_or((0, 0), |open| (open.phase, open.named.group));
        let in_step = self.open.iter().any(|open| open.named.is_step);
        Issued { label: open.map(|open| open.named.label), place, in_step, at, host: 0 }
    }

    fn end_layer(&mut self, now: u64) {
        if self.open.last().is_some_and(|open| open.span.is_none()) {
            self.close(now);
        }
    }

    fn close(&mut self, now: u64) {
        let Some(Open { named, phase, amounts, start, inner, .. }) = self.open.pop() else {
            return;
        };
        let whole = now.saturating_sub(start);
        if let Some(outer) = self.open.last_mut() {
            outer.inner += whole;
        }
        let sum = self.sums.entry((phase, named.group)).or_default();
        sum.count += 1;
        sum.whole += whole;
        sum.own += whole.saturating_sub(inner);
        sum.amounts.add(amounts);
        if self.bars.len() < ROOM {
            let row = self.open.len().min(usize::from(u16::MAX)) as u16;
            self.bars.push(Bar { label: named.label, detail: None, row, start, end: now });
        } else {
            self.dropped += 1;
        }
    }
}

/// Maximum bars of a thread, because larger pages open slowly. Sums include all spans.
pub(crate) const ROOM: usize = 400_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn named(label: u32, in_layer: bool) -> Named {
        Named { label, group: label, in_layer, is_step: false }
    }

    #[test]
    fn own_times_add_up_to_the_whole() {
        let mut log = ThreadLog::new(0, "main".into());
        let nothing = (0, Amounts::default());
        log.enter(1, named(0, false), nothing, 0); // a phase
        log.enter(2, named(1, false), nothing, 10); // a pass
        log.layer(named(2, true), 0, 20);
        log.enter(3, named(3, true), (0, Amounts { bytes: 7, tokens: 0 }), 25);
        log.exit(3, 45);
        log.layer(named(2, true), 0, 50);
        log.enter(4, named(4, false), nothing, 70); // outside of the layers
        log.exit(4, 80);
        log.exit(2, 90);
        log.exit(1, 100);
        let sum = |label: u32| log.sums[&(0, label)];
        assert_eq!((sum(0).own, sum(0).whole), (20, 100));
        assert_eq!((sum(1).own, sum(1).whole), (20, 80));
        assert_eq!((sum(2).own, sum(2).whole, sum(2).count), (30, 50, 2));
        assert_eq!((sum(3).own, sum(4).own), (20, 10));
        assert_eq!((sum(3).amounts.bytes, sum(2).amounts.bytes), (7, 0));
        assert_eq!(log.sums.values().map(|sum| sum.own).sum::<u64>(), 100);
        let rows: Vec<_> = log.bars.iter().map(|bar| (bar.label, bar.row)).collect();
        assert_eq!(rows, [(3, 3), (2, 2), (2, 2), (4, 2), (1, 1), (0, 0)]);
    }

    #[test]
    fn what_is_open_ends_with_the_recording() {
        let mut log = ThreadLog::new(0, "main".into());
        log.enter(1, named(0, false), (0, Amounts::default()), 5);
        log.layer(named(1, true), 0, 6);
        log.exit(9, 7); // another thread's
        log.finish(10);
        assert_eq!(log.sums[&(0, 0)].whole, 5);
        assert_eq!(log.bars.len(), 2);
    }
}
