//! A transformer: a small language model learns a text character by character, and then writes.

use std::process::ExitCode;

use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use serde::Deserialize;
use stoker_trainer::kernels::{
    Activation, AttentionMask, EmbeddingExt, LayerNormExt, LinearExt, OptimizerConfigExt,
    TransformerEncoderExt,
};
use stoker_trainer::{
    Context, Data, Optimizers, Result, StepOutput, Trial, burn, datasets, run_trial,
};

/// Number of characters that the model reads to predict the next one.
const WINDOW: usize = 32;
/// Size of the vector that represents a character.
const WIDTH: usize = 64;
/// Constant of layer normalizations, burn's default.
const EPSILON: f64 = 1e-5;

// 1. The text: from a URL or path in the experiment's `data`, or a generated one. `fetch`
//    downloads a URL once per machine and verifies its SHA-256.
#[derive(Deserialize)]
struct Location {
    url: Option<String>,
    sha256: Option<String>,
}

impl Location {
    fn text(&self) -> Result<String> {
        match &self.url {
            Some(url) => {
                Ok(std::fs::read_to_string(datasets::fetch(url, self.sha256.as_deref())?)?)
            }
            None => Ok(generated_text()),
        }
    }
}

/// Returns 2,000 sentences of a simple grammar.
fn generated_text() -> String {
    const NOUNS: [&str; 6] = ["cat", "dog", "mouse", "farmer", "fox", "child"];
    const VERBS: [&str; 4] = ["sees", "hears", "follows", "likes"];
    // Multiples of irrational numbers vary the words without a random generator.
    let choose = |index: u32, step: f64| (f64::from(index) * step).fract();
    let word = |words: &[&'static str], index, step| {
        words[(choose(index, step) * words.len() as f64) as usize]
    };
    let sentence = |index| {
        let (subject, object) = (word(&NOUNS, index, 0.618_034), word(&NOUNS, index, 0.732_051));
        format!("The {subject} {} the {object}.\n", word(&VERBS, index, 0.414_214))
    };
    (0..2000).map(sentence).collect()
}

// 2. The vocabulary: each distinct character is a token.
struct Corpus {
    characters: Vec<char>,
    tokens: Vec<i64>,
}

impl Corpus {
    fn new(text: &str) -> Self {
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        let token = |character| characters.partition_point(|other| *other < character) as i64;
        let tokens = text.chars().map(token).collect();
        Self { characters, tokens }
    }

    // 3. The data: window after window, without overlap. A sample is a window with the character
    //    after it. The last tenth is for validation.
    fn split(&self) -> Result<(Data<Batch>, Data<Batch>)> {
        let tokens = self.tokens.clone();
        let samples = tokens.len().saturating_sub(1) / WINDOW;
        let window = move |sample: usize| {
            tokens.get(sample * WINDOW..=(sample + 1) * WINDOW).map(<[i64]>::to_vec)
        };
        let batch = |windows: Vec<Vec<i64>>, device: &Device| {
            let shape = [windows.len(), WINDOW + 1];
            let tokens = TensorData::new(windows.concat(), shape);
            let tokens = Tensor::<2, Int>::from_data(tokens, device);
            (tokens.clone().narrow(1, 0, WINDOW), tokens.narrow(1, 1, WINDOW))
        };
        Data::items(samples, window, batch).validation_split(0.1)
    }
}

/// Characters `[samples, WINDOW]`, and for each of them the next one.
type Batch = (Tensor<2, Int>, Tensor<2, Int>);

// 4. The model: embeddings of characters and positions, then layers of burn's transformer. The
//    mask hides the characters to be predicted. `forward_fused` is burn's `forward`, but faster on
//    CPUs.
#[derive(Debug, Module)]
struct Gpt {
    characters: Embedding,
    positions: Embedding,
    layers: TransformerEncoder,
    norm: LayerNorm,
    output: Linear,
}

impl Gpt {
    fn new(vocabulary: usize, device: &Device) -> Self {
        let (num_heads, num_layers) = (4, 2);
        let layers = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, num_heads, num_layers)
            .with_dropout(0.0)
            .with_norm_first(true);
        Self {
            characters: EmbeddingConfig::new(vocabulary, WIDTH).init(device),
            positions: EmbeddingConfig::new(WINDOW, WIDTH).init(device),
            layers: layers.init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            output: LinearConfig::new(WIDTH, vocabulary).init(device),
        }
    }

    /// # Shapes
    ///
    /// - tokens: `[samples, length]`
    /// - result: `[samples * length, vocabulary]`, logits of the next character
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let ([_, length], device) = (tokens.dims(), tokens.device());
        let positions = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze();
        let positions = self.positions.forward_fused(positions);
        let embedded = self.characters.forward_fused(tokens) + positions;
        let encoded = self.layers.forward_fused(embedded, &AttentionMask::causal(), EPSILON);
        let encoded = self.norm.forward_fused(encoded, EPSILON);
        self.output.forward_fused(encoded, Activation::Identity).flatten(0, 1)
    }
}

struct Writer {
    corpus: Corpus,
    learning_rate: f64,
}

impl Trial for Writer {
    type Model = Gpt;
    type Batch = Batch;

    fn new(context: &Context) -> Result<Self> {
        let location: Location = context.data()?;
        let learning_rate = context.hparam_as("learning_rate")?;
        Ok(Self { corpus: Corpus::new(&location.text()?), learning_rate })
    }

    fn build_model(&self, device: &Device) -> Result<Gpt> {
        Ok(Gpt::new(self.corpus.characters.len(), device))
    }

    fn build_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::one(AdamWConfig::new().init_fused(), self.learning_rate))
    }

    fn build_training_data(&self) -> Result<Data<Batch>> {
        Ok(self.corpus.split()?.0)
    }

    fn build_validation_data(&self) -> Result<Data<Batch>> {
        Ok(self.corpus.split()?.1)
    }

    // 5. Each character is a sample of a classification: the class is the next character.
    fn step(&self, model: &Gpt, (characters, next): Batch) -> StepOutput {
        StepOutput::classification(model.forward(characters), next.flatten(0, 1))
    }
}

// 6. The trained model continues a text: it samples a character, appends it, and repeats.
fn write(model: &Gpt, characters: &[char], length: usize, device: &Device) -> Result<String> {
    let (mut tokens, mut text) = (vec![0_i64], String::new());
    for _ in 0..length {
        let window = &tokens[tokens.len().saturating_sub(WINDOW)..];
        let input = TensorData::new(window.to_vec(), [1, window.len()]);
        let logits = model.forward(Tensor::from_data(input, device));
        let last = logits.narrow(0, window.len() - 1, 1);
        // The largest sum of logit and Gumbel noise is a sample of the softmax.
        let uniform = Distribution::Uniform(1e-6, 1.0 - 1e-6);
        let noise = Tensor::<2>::random(last.dims(), uniform, device).log().neg().log().neg();
        let token = (last + noise).argmax(1).into_scalar::<i64>();
        tokens.push(token);
        text.push(characters[token as usize]);
    }
    Ok(text)
}

fn train(context: &Context) -> Result<()> {
    let fitted = run_trial::<Writer>(context)?;
    if context.distributed().rank() == 0 {
        let corpus = Corpus::new(&context.data::<Location>()?.text()?);
        let device = context.device().clone().without_autodiff();
        device.seed(1);
        let text = write(&fitted.model.valid(), &corpus.characters, 200, &device)?;
        println!("--- a sample of the model:\n{text}");
    }
    Ok(())
}

fn main() -> ExitCode {
    stoker_trainer::run_with(std::env::args().skip(1), train)
}
