//! Trials of an earlier experiment, and requests of the user.

use serde_json::json;
use stoker_api::decisions::PriorTrial;
use stoker_api::time::Timestamp;
use stoker_api::validate::Method;

use super::Runner;
use crate::experiment::{Ledger, Summary, Write};

/// Returns trials of an earlier experiment, best first. A grid and an external search have none.
pub(super) fn prior(method: &Method) -> Vec<PriorTrial> {
    let is_grid = matches!(method, Method::Grid { .. } | Method::External(_));
    let trial = |index: u32| PriorTrial {
        name: format!("earlier-{index}"),
        hyperparameters: json!({ "depth": 1 + index, "net": { "rate": 0.5 } }),
        metric: index.to_string(),
    };
    (0..if is_grid { 0 } else { 2 }).map(trial).collect()
}

impl Runner {
    /// Takes in a request to reopen trials. Returns whether there was one, `None` after a crash.
    pub(super) fn take_request(
        &mut self,
        ledger: &mut Ledger,
        is_over: bool,
        run: &mut impl FnMut(&mut Self, Vec<Write>) -> bool,
    ) -> Option<bool> {
        let records = self.records();
        let record_of = |index: u32| records.iter().find(|record| record.spec.index == index);
        let request = self.reopen.filter(|_| !is_over);
        let spending = Summary::new(&self.config, &records);
        let writes = ledger.reopen(request, &spending, record_of, Timestamp(self.now));
        let is_reopened = !writes.is_empty();
        (run(self, writes) && self.create(ledger, run)).then_some(is_reopened)
    }
}
