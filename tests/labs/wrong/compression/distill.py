"""Lab 15, distill: each body, written after the solution, is a wrong answer."""


def a_copy_is_trained():
    """Trains a copy and returns it: the student that was given has learned nothing.

    kind: inputs
    hint: not the student given
    """
    right = distill

    def distill(teacher, student, batches, lr=1e-2):
        import copy

        return right(teacher, copy.deepcopy(student), batches, lr)


def a_graph_of_the_teacher():
    """The teacher's pass is kept for a backward pass that it will not have.

    kind: memory
    hint: makes a graph
    """

    def distill(teacher, student, batches, lr=1e-2):
        optimizer = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0)
        for tokens, targets in batches:
            loss = distillation_loss(student(tokens), teacher(tokens), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return student


def both_learn():
    """The teacher is in the optimizer, too.

    kind: inputs
    hint: of the teacher is not what it was
    """

    def distill(teacher, student, batches, lr=1e-2):
        both = [*student.parameters(), *teacher.parameters()]
        optimizer = torch.optim.AdamW(both, lr=lr, weight_decay=0.0)
        for tokens, targets in batches:
            loss = distillation_loss(student(tokens), teacher(tokens), targets)
            loss = loss + cross_entropy(teacher(tokens), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        return student


def cross_entropy_is_softened():
    """The temperature divides all logits.

    kind: values
    hint: as they are, not divided
    """

    def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
        student = student_logits.float() if student_logits.element_size() < 4 else student_logits
        student, soft = student / temperature, teacher_logits.detach().to(student) / temperature
        kl = F.kl_div(
            student.log_softmax(-1), soft.log_softmax(-1), log_target=True, reduction="none"
        )
        hard = cross_entropy(student, targets)
        return share * temperature**2 * kl.sum(-1).mean() + (1 - share) * hard


def forgets_to_zero():
    """Gradients of earlier steps add up.

    kind: values
    hint: nats a token away
    """

    def distill(teacher, student, batches, lr=1e-2):
        optimizer = torch.optim.SGD(student.parameters(), lr=lr, momentum=0.9)
        for tokens, targets in batches:
            with torch.no_grad():
                said = teacher(tokens)
            distillation_loss(student(tokens), said, targets).backward()
            optimizer.step()
        optimizer.zero_grad()
        return student


def gradient_for_the_teacher():
    """The teacher's logits are not cut off.

    kind: work
    hint: logits get a gradient
    """

    def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
        least = torch.promote_types(student_logits.dtype, torch.float32)
        student = (student_logits.to(least) / temperature).log_softmax(dim=-1)
        teacher = (teacher_logits.to(least) / temperature).log_softmax(dim=-1)
        kl = (teacher.exp() * (teacher - student)).sum(dim=-1).mean()
        hard = cross_entropy(student_logits, targets)
        return share * temperature**2 * kl + (1 - share) * hard


def in_bf16():
    """The loss in the type of the logits.

    kind: types
    hint: torch.bfloat16
    """
    right = distillation_loss

    def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
        loss = right(student_logits, teacher_logits, targets, temperature, share)
        return loss.to(student_logits.dtype)


def keeps_the_losses():
    """A list of losses, each with its pass.

    kind: memory
    hint: still held
    """
    losses, plain = [], distillation_loss

    def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
        loss = plain(student_logits, teacher_logits, targets, temperature, share)
        losses.append(loss)
        return loss


def kl_the_other_way():
    """The student's probabilities weigh.

    kind: values
    hint: whose probabilities weigh
    """

    def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
        least = torch.promote_types(student_logits.dtype, torch.float32)
        student = (student_logits.to(least) / temperature).log_softmax(dim=-1)
        teacher = (teacher_logits.detach().to(least) / temperature).log_softmax(dim=-1)
        kl = (student.exp() * (student - teacher)).sum(dim=-1).mean()
        hard = cross_entropy(student_logits, targets)
        return share * temperature**2 * kl + (1 - share) * hard


def large_logits_overflow():
    """exp of logits as they are.

    kind: sizes
    hint: the loss is nan | the loss is inf
    """

    def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
        least = torch.promote_types(student_logits.dtype, torch.float32)
        student = (student_logits.to(least) / temperature).exp()
        teacher = (teacher_logits.detach().to(least) / temperature).exp()
        student = student / student.sum(-1, keepdim=True)
        teacher = teacher / teacher.sum(-1, keepdim=True)
        kl = (teacher * (teacher.log() - student.log())).sum(dim=-1).mean()
        hard = cross_entropy(student_logits, targets)
        return share * temperature**2 * kl + (1 - share) * hard


def learns_the_first_batch():
    """One batch again and again.

    kind: part
    hint: of 3 batches | of 40 batches | the budget is | nats a token away
    """

    def distill(teacher, student, batches, lr=1e-2):
        optimizer = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0)
        tokens, targets = next(iter(batches))
        with torch.no_grad():
            said = teacher(tokens)
        for _ in range(len(batches)):
            loss = distillation_loss(student(tokens), said, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        return student


def mean_over_all_numbers():
    """F.kl_div with its default mean.

    kind: values
    hint: not over all numbers
    """

    def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
        least = torch.promote_types(student_logits.dtype, torch.float32)
        student = (student_logits.to(least) / temperature).log_softmax(dim=-1)
        teacher = (teacher_logits.detach().to(least) / temperature).log_softmax(dim=-1)
        kl = F.kl_div(student, teacher, log_target=True, reduction="none").mean()
        hard = cross_entropy(student_logits, targets)
        return share * temperature**2 * kl + (1 - share) * hard


def mean_over_rows():
    """F.kl_div's batchmean divides by rows, not by tokens.

    kind: values
    hint: not over rows
    """

    def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
        least = torch.promote_types(student_logits.dtype, torch.float32)
        student = (student_logits.to(least) / temperature).log_softmax(dim=-1)
        teacher = (teacher_logits.detach().to(least) / temperature).log_softmax(dim=-1)
        kl = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
        hard = cross_entropy(student_logits, targets)
        return share * temperature**2 * kl + (1 - share) * hard


def no_square_of_the_temperature():
    """Without τ² the teacher's part shrinks where τ grows.

    kind: values
    hint: τ² is missing
    """
    right = distillation_loss

    def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
        hard = cross_entropy(student_logits, targets)
        whole = right(student_logits, teacher_logits, targets, temperature, share)
        return (whole - (1 - share) * hard) / temperature**2 + (1 - share) * hard


def nothing_is_learned():
    """No step is made.

    kind: part
    hint: nats a token away
    """

    def distill(teacher, student, batches, lr=1e-2):
        for tokens, _ in batches:
            with torch.no_grad():
                teacher(tokens)
        return student


def share_the_other_way():
    """share weighs the cross entropy.

    kind: values
    hint: share belongs to KL
    """
    right = distillation_loss

    def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
        return right(student_logits, teacher_logits, targets, temperature, 1 - share)


def steps_for_a_large_model():
    """Steps that are far too small for so few of them.

    kind: constants
    hint: nats a token away
    """
    right = distill

    def distill(teacher, student, batches, lr=1e-4):
        return right(teacher, student, batches, lr)


def the_tokens_alone():
    """The teacher is asked, and not listened to.

    kind: values
    hint: nats a token away
    """

    def distill(teacher, student, batches, lr=1e-2):
        optimizer = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0)
        for step, (tokens, targets) in enumerate(batches):
            optimizer.param_groups[0]["lr"] = lr * (1 - step / len(batches))
            with torch.no_grad():
                teacher(tokens)
            optimizer.zero_grad()
            cross_entropy(student(tokens), targets).backward()
            optimizer.step()
        optimizer.zero_grad()
        return student


def the_teacher_never_asked():
    """Plain training.

    kind: constants
    hint: never asked
    """

    def distill(teacher, student, batches, lr=1e-2):
        optimizer = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0)
        for tokens, targets in batches:
            optimizer.zero_grad()
            cross_entropy(student(tokens), targets).backward()
            optimizer.step()
        optimizer.zero_grad()
        return student


def teacher_takes_part():
    """The teacher's weights want no gradient any more.

    kind: inputs
    hint: requires_grad of
    """
    right = distill

    def distill(teacher, student, batches, lr=1e-2):
        teacher.requires_grad_(False)
        return right(teacher, student, batches, lr)


def twice_through():
    """A second time through the batches.

    kind: work
    hint: goes through the batches twice
    """
    right = distill

    def distill(teacher, student, batches, lr=1e-2):
        right(teacher, student, batches, lr)
        return right(teacher, student, batches, lr / 2)


def two_steps_a_batch():
    """Each batch is learned twice while it is there.

    kind: work
    hint: the budget is
    """
    right = distill

    class Twice:
        def __init__(self, batches):
            self.batches = batches

        def __len__(self):
            return 2 * len(self.batches)

        def __iter__(self):
            for batch in self.batches:
                yield batch
                yield batch

    def distill(teacher, student, batches, lr=1e-2):
        return right(teacher, student, Twice(batches), lr)


def the_library():
    """Asks the course's own room.

    kind: library
    hint: is the library
    """
    import utils.compression

    rounded = utils.compression.quantize


def text_of_its_own():
    """Learns from tokens by lot besides, past the embedding.

    kind: work
    hint: the budget is
    """
    right = distill

    def distill(teacher, student, batches, lr=1e-2):
        from utils.models.gpt import rotary_tables

        def through(model, tokens):
            x = F.embedding(tokens, model.model.embed_tokens.weight)
            cos, sin = rotary_tables(model.config, torch.arange(tokens.shape[1]), x.dtype)
            for layer in model.model.layers:
                x = layer(x, cos[:, None], sin[:, None])
            return model.lm_head(model.model.norm(x))

        optimizer = torch.optim.AdamW(student.parameters(), lr)
        for _ in range(10):
            tokens = torch.randint(teacher.config.vocab_size, (8, 16))
            with torch.no_grad():
                said = through(teacher, tokens)
            optimizer.zero_grad()
            distillation_loss(through(student, tokens), said, tokens, 2.0, 1.0).backward()
            optimizer.step()
        return right(teacher, student, batches, lr)


def the_likeliest_token_alone():
    """Learns what the teacher would have said, not how likely all else was.

    kind: part
    hint: nats a token away
    """

    def distill(teacher, student, batches, lr=1e-2):
        optimizer = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0)
        for step, (tokens, _) in enumerate(batches):
            optimizer.param_groups[0]["lr"] = lr * (1 - step / len(batches))
            with torch.no_grad():
                said = teacher(tokens).argmax(dim=-1)
            optimizer.zero_grad()
            cross_entropy(student(tokens), said).backward()
            optimizer.step()
        optimizer.zero_grad()
        return student
