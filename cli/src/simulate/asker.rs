//! Asks the external searcher of a simulated search.

use serde_json::json;
use stoker_api::external::{Answer, PROTOCOL_VERSION, Question, QuestionSpec};
use stoker_api::validate::ValidExperiment;
use stoker_engine::search::SearchConfig;
use stoker_engine::search::methods::DueQuestion;
use stoker_engine::search::state::SearchState;
use tokio::runtime::Runtime;

use crate::failure::Failure;
use crate::run::record::random_hex;
use crate::run_root::run_id;
use crate::searcher::{Searcher, Target};

/// External searcher of one simulation.
pub(super) struct Asker {
    /// Unset if the search has none.
    searcher: Option<(Runtime, Searcher)>,
    /// Unique, so that a service does not repeat answers of another simulation.
    experiment: String,
    spec: QuestionSpec,
    directions: Vec<bool>,
}

impl Asker {
    pub(super) fn new(valid: &ValidExperiment, config: &SearchConfig) -> Result<Self, Failure> {
        let searcher = match &valid.spec.searcher.external {
            None => None,
            Some(search) => {
                let runtime =
                    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(
                        |error| Failure::System(format!("cannot start the async runtime: {error}")),
                    )?;
                Some((runtime, Searcher::new(Target::new(search)?)))
            }
        };
        let others = config.other_objectives.iter().map(|objective| objective.smaller_is_better);
        Ok(Self {
            searcher,
            experiment: run_id(&valid.name, &random_hex(4)?),
            spec: QuestionSpec {
                searcher: json!(valid.spec.searcher),
                hyperparameters: valid.spec.hyperparameters.clone(),
            },
            directions: std::iter::once(config.smaller_is_better).chain(others).collect(),
        })
    }

    /// Asks a question and waits for the answer.
    pub(super) fn ask(
        &mut self,
        search: &SearchState,
        DueQuestion { call, through }: DueQuestion,
        tags: &[Option<String>],
    ) -> Result<Answer, String> {
        let Some((runtime, searcher)) = &mut self.searcher else {
            return Err("the search has no external searcher".to_owned());
        };
        let tag_of = |trial: u32| tags.get(trial as usize).cloned().flatten();
        let question = Question {
            version: PROTOCOL_VERSION,
            experiment: self.experiment.clone(),
            call,
            spec: self.spec.clone(),
            events: search.events_through(through, &self.directions, &tag_of),
            // A program is started once, for the first question.
            history: searcher.is_starting().then(Vec::new),
        };
        runtime.block_on(searcher.ask(&question)).map_err(|error| error.to_string())
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        if let Some((runtime, searcher)) = &mut self.searcher {
            runtime.block_on(searcher.finish());
        }
    }
}
