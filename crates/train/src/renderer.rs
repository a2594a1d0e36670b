//! The renderer of a run: burn-train's dashboard, or none if the run prints lines of text.
//!
//! Metrics go to `history.jsonl` only, because burn-train's own log files panic on a full disk.

use burn_train::{
    Interrupter,
    logger::{EvaluationProgressLogger, MetricLogger, TrainingProgressLogger},
    metric::{
        MetricDefinition, NumericEntry,
        store::{EpochSummary, MetricsUpdate, Split},
    },
    renderer::{
        EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
        MetricsRendererTraining,
    },
};

/// Creates the dashboard or a silent renderer. `resumed` is the epoch after which a run continues.
///
/// # Errors
/// A dashboard in a build without the feature `tui`.
#[cfg_attr(not(feature = "tui"), expect(unused_variables, reason = "for the dashboard alone"))]
pub(crate) fn new(
    dashboard: bool,
    interrupter: &Interrupter,
    resumed: Option<usize>,
) -> crate::Result<Box<dyn MetricsRenderer>> {
    match dashboard {
        #[cfg(feature = "tui")]
        true => Ok(Box::new(crate::dashboard::new(interrupter.clone(), resumed))),
        #[cfg(not(feature = "tui"))]
        true => Err(crate::Error::setting("dashboard", true, "needs the feature tui")),
        false => Ok(Box::new(Silent)),
    }
}

pub(crate) struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
}

impl TrainingProgressLogger for Silent {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}
    fn update_epoch(&mut self, _: usize) {}
    fn start_split(&mut self, _: &str, _: usize) {}
    fn update_split(&mut self, _: usize) {}
    fn end_split(&mut self) {}
    fn end(&mut self) {}
    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for Silent {
    fn start_global_progress(&mut self, _: usize) {}
    fn start_test(&mut self, _: &str, _: usize) {}
    fn update_test_progress(&mut self, _: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

impl MetricLogger for Silent {
    fn log(&mut self, _: MetricsUpdate, _: usize, _: &Split) {}
    fn log_metric_definition(&mut self, _: MetricDefinition) {}
    fn log_epoch_summary(&mut self, _: EpochSummary) {}

    fn read_numeric(&mut self, _: &str, _: usize, _: &Split) -> Result<Vec<NumericEntry>, String> {
        Ok(Vec::new())
    }
}
