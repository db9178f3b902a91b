//! Page of rungs.

use super::decisions;
use super::head::{ExperimentTab, head};
use super::order::built_in;
use crate::site::Site;
use crate::store::Run;
use crate::text;
use crate::views::{RungRow, RungsPage};

/// Number of decisions beside the ladder, which is as high.
const DECISIONS: usize = 14;

/// Returns the brackets with rungs.
pub(crate) fn brackets(run: &Run) -> Vec<u32> {
    let Ok(explanation) = &run.search().explanation else { return Vec::new() };
    let has_rungs =
        |bracket: &&stoker_engine::experiment::explain::BracketExplanation| bracket.rungs.len() > 1;
    explanation.brackets.iter().filter(has_rungs).map(|bracket| bracket.bracket).collect()
}

/// Returns the ladder as a sentence.
pub(crate) fn label(run: &Run) -> String {
    let Ok(explanation) = &run.search().explanation else { return String::new() };
    let brackets = explanation.brackets.iter();
    let results: u32 = brackets.flat_map(|bracket| &bracket.rungs).map(|rung| rung.results).sum();
    let promoted: u32 = explanation.brackets.iter().map(|bracket| bracket.promotions).sum();
    format!(
        "Rungs: {}, {}",
        text::num(results as usize, "result"),
        text::num(promoted as usize, "promotion")
    )
}

/// Returns the page of rungs.
pub(crate) fn page(site: &Site, run: &Run, bracket: Option<u32>) -> RungsPage {
    let all = brackets(run);
    let shown = bracket.filter(|one| all.contains(one)).or(all.first().copied()).unwrap_or(0);
    let (decisions, decisions_total) = decisions(run, Some(shown), DECISIONS);
    let mut unit = run.search().unit.plural().to_owned();
    unit[..1].make_ascii_uppercase();
    RungsPage {
        head: head(site, run, ExperimentTab::Rungs),
        brackets: all,
        bracket: shown,
        ladder_label: label(run),
        metric: text::name(&run.experiment.spec.searcher.metric),
        unit,
        rungs: rows(run),
        decisions,
        decisions_total,
    }
}

fn rows(run: &Run) -> Vec<RungRow> {
    let Ok(explanation) = &run.search().explanation else { return Vec::new() };
    let (of_bracket, of_rung) = (built_in(run, "bracket"), built_in(run, "rung"));
    let mut rows = Vec::new();
    for bracket in explanation.brackets.iter().filter(|bracket| bracket.rungs.len() > 1) {
        for (position, rung) in bracket.rungs.iter().enumerate() {
            let filter = format!("{of_bracket} = {} and {of_rung} > {position}", bracket.bracket);
            let is_top = position + 1 == bracket.rungs.len();
            rows.push(RungRow {
                bracket: if position == 0 { bracket.bracket.to_string() } else { String::new() },
                href: format!("{}/trials?filter={}", run.base(), text::query(&filter)),
                units: text::count(rung.units),
                training: rung.training,
                results: rung.results,
                promoted: if is_top { "top".to_owned() } else { rung.promoted.to_string() },
                paused: rung.paused,
                ended: rung.ended,
                cut: text::optional(rung.cut_metric),
                best: text::optional(rung.best_metric),
                next: rung.next.to_string(),
            });
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use askama::Template as _;
    use serde_json::json;

    use super::*;
    use crate::fixture;

    #[test]
    fn brackets_are_links_that_load_their_decisions() {
        let run = fixture::run(json!({}), json!({}), &[]);
        let mut shown = page(&Site::default(), &run, None);
        (shown.brackets, shown.bracket) = (vec![0, 1], 1);
        let html = shown.render().unwrap();
        assert!(html.contains("rungs?bracket=0\""), "{html}");
        assert!(html.contains("bracket 1</span>"), "{html}");
        // Scripts set such options without a request, so the decisions would stay.
        assert!(!html.contains("data-option=\"bracket\""), "{html}");
    }
}
