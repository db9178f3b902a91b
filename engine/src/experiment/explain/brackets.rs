//! Explains brackets: their counts, rungs and next actions.

use super::explainer::Context;
use super::{BracketExplanation, Next, RungExplanation, RungNext, State, TrialExplanation};
use crate::search::rung::Loss;
use crate::search::state::SearchState;
use crate::search::view::{BracketView, NextPromotion, PEERS_MAX, Rule, RungView};

/// Returns the brackets of a search.
pub(super) fn brackets(
    context: Context,
    search: &SearchState,
    trials: &[TrialExplanation],
) -> Vec<BracketExplanation> {
    let views = search.views();
    let is_single = views.len() == 1;
    let explain = |(bracket, view): (u32, &BracketView)| {
        let members: Vec<&TrialExplanation> =
            trials.iter().filter(|trial| is_single || trial.bracket == bracket).collect();
        let num = |states: &[State]| {
            members.iter().filter(|trial| states.contains(&trial.state())).count() as u32
        };
        let (training, waiting, paused) =
            (num(&[State::Training]), num(&[State::Waiting]), num(&[State::Paused]));
        let (stopped, completed) = (num(&[State::Stopped]), num(&[State::Completed]));
        let created = members.len() as u32;
        let rungs =
            (1..).zip(&view.rungs).map(|(number, rung)| explain_rung(context, number, rung));
        BracketExplanation {
            bracket,
            created,
            remaining: view.num_missing,
            training,
            waiting,
            paused,
            promotions: view.rungs.iter().map(|rung| rung.num_promoted as u32).sum(),
            stopped,
            completed,
            ended: created - training - waiting - paused - stopped - completed,
            places: view.places,
            next: next(context, search, view, &members),
            rungs: rungs.collect(),
        }
    };
    (0..).zip(&views).map(explain).collect()
}

fn explain_rung(context: Context, rung: u32, view: &RungView) -> RungExplanation {
    let metric = |loss: Option<Loss>| loss.and_then(|loss| context.metric(loss));
    let results = view.num_results as u32;
    RungExplanation {
        rung,
        units: view.units,
        training: view.num_training as u32,
        results,
        promoted: view.num_promoted as u32,
        paused: view.num_paused as u32,
        ended: view.num_ended as u32,
        cut_metric: metric(view.cut),
        best_metric: metric(view.best),
        next: RungNext { next: view.next, results, smaller_is_better: context.smaller_is_better },
    }
}

/// Returns the next action of a bracket whose decisions have all been made.
fn next(
    context: Context,
    search: &SearchState,
    view: &BracketView,
    members: &[&TrialExplanation],
) -> Next {
    let is_open = |trial: &TrialExplanation| trial.state() < State::Stopped;
    let num_open = members.iter().filter(|trial| is_open(trial)).count();
    if let Some(question) = search.question() {
        return Next::WaitsForAnswer { call: question.call };
    }
    if search.book().is_finished() || (num_open == 0 && view.num_missing == 0) {
        return Next::Finished { trials: members.len() as u32 };
    }
    if search.book().next_index() == 0 {
        return Next::Begins;
    }
    let promotion = view.rungs.windows(2).rev().find_map(|pair| match pair[0].next {
        NextPromotion::Trial(trial) => Some((trial, pair[1].units)),
        _ => None,
    });
    if let Some((trial, units)) = promotion {
        return Next::Promotes { trial, units, unit: context.unit };
    }
    if view.num_missing > 0 {
        let remaining = view.num_missing;
        return match search.has_given_up() {
            true => Next::CreatesAfterResult { remaining },
            false => Next::Creates { remaining },
        };
    }
    let training: Vec<u32> = members
        .iter()
        .filter(|trial| trial.state() == State::Training)
        .map(|trial| trial.trial)
        .collect();
    // Rounds are compared one after another, so the round with training trials is the next to end.
    let rung = (1..).zip(&view.rungs).find(|(_, rung)| rung.num_training > 0);
    let round = rung.filter(|_| search.rule() == Rule::Population).map(|(number, _)| number);
    Next::WaitsFor {
        training: training.len() as u32,
        trials: training.into_iter().take(PEERS_MAX).collect(),
        round,
    }
}
