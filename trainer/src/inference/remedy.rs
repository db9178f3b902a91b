//! Remedies in error messages of a job. They depend on what runs the job.

use stoker_api::names::MANIFEST;

use crate::context::Context;

/// Program that runs a job.
#[derive(Clone, Copy, Debug)]
enum Runner {
    /// The inference program itself.
    Alone,
    /// `stoker job run`.
    Local,
    /// The operator, whose jobs neither change nor start over.
    Operator,
}

impl Runner {
    fn of(context: &Context) -> Self {
        let config = &context.config;
        // Only the operator has a report server, and a program without a runner has no spec.
        match (config.report_endpoint.url.is_empty(), config.spec.is_null()) {
            (false, _) => Self::Operator,
            (true, false) => Self::Local,
            (true, true) => Self::Alone,
        }
    }
}

/// Returns the remedies for a row that fails the job.
pub(super) fn of_bad_row(context: &Context) -> &'static str {
    match Runner::of(context) {
        // The arguments identify the job.
        Runner::Alone => {
            "use --skip-errors, or correct it and use --fresh; both process all rows again"
        }
        Runner::Local => {
            "set onError: skip to resume without such rows, or correct it and start over with \
             --fresh"
        }
        Runner::Operator => "correct it or set onError: skip, and create another job",
    }
}

/// Returns the remedies for an input that has changed.
pub(super) fn of_changed_input(context: &Context) -> &'static str {
    match Runner::of(context) {
        Runner::Alone | Runner::Local => "restore it to resume, or start over with --fresh",
        Runner::Operator => "create another job",
    }
}

/// Returns the remedies for an input whose rows were all rejected.
pub(super) fn of_rejected_input(context: &Context) -> &'static str {
    match Runner::of(context) {
        Runner::Alone | Runner::Local => {
            "correct the input or the program, and start over with --fresh"
        }
        Runner::Operator => "correct the input or the program, and create another job",
    }
}

/// Returns the remedies for an output directory that another job has written.
pub(super) fn of_other_output(context: &Context) -> String {
    match Runner::of(context) {
        Runner::Alone | Runner::Local => {
            "use another directory, or replace it with --fresh".to_owned()
        }
        Runner::Operator => format!(
            "create another job, with another output.url, or after deleting {MANIFEST} to replace \
             the output"
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::train::Standalone;

    #[test]
    fn remedies_depend_on_what_runs_the_job() {
        let mut context = Standalone { quiet: true, ..Standalone::default() }.context().unwrap();
        assert!(of_bad_row(&context).starts_with("use --skip-errors"));
        context.config.spec = json!({"input": {"url": "in"}});
        assert!(of_bad_row(&context).starts_with("set onError: skip to resume"));
        assert!(of_changed_input(&context).contains("--fresh"));
        assert!(of_other_output(&context).contains("--fresh"));
        // On a cluster, a job cannot start over.
        context.config.report_endpoint.url = "http://operator".to_owned();
        let remedies = [
            of_bad_row(&context).to_owned(),
            of_changed_input(&context).to_owned(),
            of_rejected_input(&context).to_owned(),
            of_other_output(&context),
        ];
        for remedy in remedies {
            assert!(remedy.contains("create another job"), "{remedy}");
            assert!(!remedy.contains("--fresh"), "{remedy}");
        }
    }
}
