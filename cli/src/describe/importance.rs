//! Importance of hyperparameters as text and JSON.

use serde_json::{Value, json};
use stoker_api::experiment::Experiment;
use stoker_engine::experiment::explain::length;
use stoker_engine::experiment::importance::{Importance, Share, Unknown, importance};
use stoker_engine::trial::TrialRecord;

use crate::cluster::text::section;
use crate::explain;

/// Characters of a bar that stands for all of the variance.
const BAR_CHARS: f64 = 25.0;

/// Importance of an experiment's hyperparameters, or the reason why there is none.
pub(crate) struct Explained(Result<Importance, String>);

/// Returns the importance of an experiment's hyperparameters from its record.
pub(crate) fn of<'a>(
    experiment: &Experiment,
    trials: impl IntoIterator<Item = &'a TrialRecord>,
) -> Explained {
    Explained(explain::config(experiment).and_then(|config| {
        importance(&config, trials).map_err(|unknown: Unknown| unknown.to_string())
    }))
}

impl Explained {
    /// Adds the importance to the JSON of an experiment.
    pub(crate) fn add_to(&self, metric: &str, mut object: Value) -> Value {
        object["importance"] = match &self.0 {
            Ok(importance) => {
                let mut fields = json!(importance);
                fields["metric"] = metric.into();
                fields
            }
            Err(reason) => json!({ "error": reason }),
        };
        object
    }

    /// Returns the table of hyperparameters, the most important first.
    pub(super) fn section(&self, metric: &str) -> String {
        let importance = match &self.0 {
            Ok(importance) => importance,
            Err(reason) => return format!("\n\nImportance: {reason}"),
        };
        let row = |name: String, share: f64, deviation: Option<f64>| {
            let deviation = deviation.map(|deviation| format!(" ± {}", two_digits(deviation)));
            let bar = "=".repeat((share * BAR_CHARS).round() as usize);
            vec![name, two_digits(share) + &deviation.unwrap_or_default(), bar]
        };
        let mut rows: Vec<Vec<String>> = importance
            .hyperparameters
            .iter()
            .map(|share| row(name(share), share.importance, Some(share.deviation)))
            .collect();
        rows.push(row("(combinations)".to_owned(), importance.interactions, None));
        section(&title(metric, importance), &["HYPERPARAMETER", "SHARE OF VARIANCE", ""], &rows)
    }
}

fn title(metric: &str, importance: &Importance) -> String {
    let Importance { units, unit, results, not_finite, .. } = importance;
    let length = length(*units, *unit);
    let without = match not_finite {
        0 => String::new(),
        1 => ", without one that is not finite".to_owned(),
        num => format!(", without {num} that are not finite"),
    };
    format!("Importance for {metric} at {length}, from {results} results{without}")
}

/// Returns the path, and the group of a choice.
fn name(share: &Share) -> String {
    match &share.group {
        Some(group) => format!("{} ({group})", share.name),
        None => share.name.clone(),
    }
}

/// Formats a share with two decimals.
fn two_digits(share: f64) -> String {
    match share {
        share if share > 0.0 && share < 0.005 => "<0.01".to_owned(),
        share => format!("{share:.2}"),
    }
}
