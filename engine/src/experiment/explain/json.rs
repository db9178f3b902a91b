//! JSON of explanations. Sentences are added as `text`.

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::{BracketExplanation, Decision, Explanation, RungNext, TrialExplanation};
use crate::search::view::{NextPromotion, Rule};

/// Number of decisions in the JSON of an experiment.
const DECISIONS_MAX: usize = 64;

/// Returns the fields of a value, and its sentence as `text`.
fn described(value: &(impl Serialize + std::fmt::Display)) -> Value {
    let mut fields = serde_json::to_value(value).unwrap_or_default();
    fields["text"] = value.to_string().into();
    fields
}

pub(super) fn with_text<S: Serializer>(
    value: &(impl Serialize + std::fmt::Display),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    described(value).serialize(serializer)
}

pub(super) fn rule<S: Serializer>(rule: &Rule, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match rule {
        Rule::FullLength => "fullLength",
        Rule::Promotion => "promotion",
        Rule::StopOnce => "stopOnce",
        Rule::Synchronous => "synchronous",
        Rule::Population => "population",
        Rule::External => "external",
    })
}

impl Serialize for RungNext {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let metric = |loss: crate::search::rung::Loss| loss.to_metric(self.smaller_is_better);
        let fields = match self.next {
            NextPromotion::Top => json!({ "action": "none" }),
            NextPromotion::Trial(trial) => json!({ "action": "promotes", "trial": trial }),
            NextPromotion::AtResults(results) => {
                json!({ "action": "waitsForResults", "results": results })
            }
            NextPromotion::AfterResults(missing) => {
                json!({ "action": "waitsForResults", "results": self.results + missing as u32 })
            }
            NextPromotion::Below(loss) | NextPromotion::AtMost(loss) => {
                json!({ "action": "promotesBetter", "metric": metric(loss) })
            }
            NextPromotion::Closed => json!({ "action": "closed" }),
        };
        fields.serialize(serializer)
    }
}

impl TrialExplanation {
    /// Returns the state, the reason for it and all decisions.
    pub fn to_json(&self) -> Value {
        let decisions: Vec<Value> = self.decisions.iter().map(described).collect();
        json!({
            "state": self.state(), "bracket": self.bracket, "units": self.units,
            "why": self.why.as_ref().map(Decision::to_json), "decisions": decisions,
        })
    }
}

impl Decision {
    /// Returns the decision with its sentence.
    pub fn to_json(&self) -> Value {
        described(self)
    }
}

impl Explanation {
    /// Returns the brackets, the state of each trial and the latest decisions.
    pub fn to_json(&self) -> Value {
        let trial = |trial: &TrialExplanation| {
            let (state, why) = (trial.state(), trial.reason());
            json!({ "trial": trial.trial, "state": state, "why": why })
        };
        let trials: Vec<Value> = self.trials.iter().map(trial).collect();
        let decisions = self.decisions();
        let num_left_out = decisions.len().saturating_sub(DECISIONS_MAX);
        let latest: Vec<Value> =
            decisions[num_left_out..].iter().map(|decision| decision.to_json()).collect();
        let brackets: &[BracketExplanation] = &self.brackets;
        json!({ "brackets": brackets, "trials": trials, "decisions": latest })
    }
}
